"""The page of a study: verdicts, tuning and cost, made from the study's folder alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perturn.analysis import number_text
from perturn.analysis.run_comparison import flat
from perturn.data.run_paths import RunPaths
from perturn.io.atomic_write import write_whole
from perturn.report.report_page import ASSETS, fill
from perturn.report.report_sections import Figure, draw
from perturn.study.tables import study_figures
from perturn.study.tables.markdown_tables import tables
from perturn.study.tables.study_records import RecordedStudy, read_recorded
from perturn.study.tables.verdict_text import WORDS, p_value, points, sentences
from perturn.study.tables.verdicts import summary_of

_OWN = Path(__file__).parent / "assets"
_CODE = [*(ASSETS / f"{name}.js" for name in ("core", "nav", "figures", "tables")), _OWN / "study.js"]
_STYLES = [ASSETS / "base.css", ASSETS / "report.css"]


def write_study_page(folder: Path) -> Path:
    """Write `summary.json`, `report.html` and `table.md` of a study, each whole or not at all.

    Args:
        folder: Of the study; it may be unfinished.

    Returns:
        The path of the page.

    Raises:
        RunError: If the folder holds no study, or a file of it is malformed.
        StorageError: If a file cannot be written.
    """
    study = read_recorded(folder)
    summary = summary_of(study)
    html = page(study, summary)
    paths = RunPaths(folder)
    write_whole(paths.summary, json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    write_whole(folder / "table.md", tables(summary), errors="backslashreplace")
    write_whole(paths.page, html, errors="backslashreplace")
    return paths.page


def page(study: RecordedStudy, summary: Mapping[str, Any]) -> str:
    """Fill the template.

    Args:
        study: The study.
        summary: Its numbers, as `verdicts.summarize` gives them.

    Returns:
        The whole page, which fetches nothing.
    """
    values = {
        "title": study.name,
        "study": summary,
        "words": WORDS,
        "environments": [
            {"name": name, "number": number, **found, **_shown(study, name, number, found)}
            for number, (name, found) in enumerate(summary["environments"].items())
        ],
        "settings": flat(study.settings),
        "panels": {name: study.settings.get(name) for name in ("tune", "test") if study.settings.get(name)},
    }
    filters = (points, p_value, sentences, point_lines)
    return fill("study.html.j2", values, style=_STYLES, code=_CODE, filters=filters, assets=(_OWN, ASSETS))


def point_lines(point: Mapping[str, Any]) -> str:
    """A point in short: keys by their last part."""
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in point.items())


def _shown(study: RecordedStudy, name: str, number: int, found: Mapping[str, Any]) -> dict[str, Any]:
    """An environment as the page has it, beyond the summary."""
    methods: Sequence[Mapping[str, Any]] = found["methods"]
    style = study_figures.styles([row["method"] for row in methods], study.baseline)
    pairs = _comparisons(found)
    played = {row["method"]: study.played("test", name, row["method"]) for row in methods}
    by_length = "Test episodes of all seeds. Where success ends an episode, those that succeed are short."
    return {
        "protocol_line": number_text.protocol_line(found["protocol"]) if found["protocol"] else "",
        "pairs": pairs,
        "differences": {
            measure: draw(
                f"differences-{measure}-{number}", "", _reading(measure),
                study_figures.differences(pairs, measure, style),
            )
            for measure in found["measures"]
        },
        "curves": list(_curves(found["tuning"], number, style)),
        "lengths": draw(
            f"length-{number}", "Success against length", by_length, study_figures.lengths(played, style)
        ),
    }  # fmt: skip


def _comparisons(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All comparisons of an environment with their names: those with the baseline by the method alone."""
    measures = found["measures"]
    return [
        {"name": row["method"], "method": row["method"]} | {each: row[each]["against"] for each in measures}
        for row in found["methods"]
    ] + [{"name": f"{row['method']} against {row['other']}", **row} for row in found["further"]]


def _reading(measure: str) -> str:
    unit = "points of success" if measure == "success" else "score"
    return f"In {unit}, paired by task and seed. Diamonds: all seeds, 95\u00a0% interval. Bars: single seeds."


def _curves(
    tuning: Sequence[Mapping[str, Any]], number: int, style: Mapping[str, Mapping[str, str]]
) -> Iterator[Figure]:
    for index, key in enumerate(study_figures.swept_keys(tuning)):
        caption = "Tuning panel, 95\u00a0% intervals. The large mark is the point that was tested."
        yield from draw(
            f"tuning-{number}-{index}",
            f"Success against {key}",
            caption,
            study_figures.tuning_curve(tuning, key, style),
        )
