"""Write the page of a study, with verdicts, tuning and cost, from the files in the study's folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perturn.analysis import number_text
from perturn.analysis.number_text import protocol_line
from perturn.analysis.run_comparison import flat
from perturn.data.run_paths import RunPaths
from perturn.io.atomic_write import write_whole
from perturn.report.report_page import ASSETS, fill
from perturn.report.report_sections import Figure, draw
from perturn.study.cells import point_text
from perturn.study.tables import study_figures
from perturn.study.tables.comparisons import LEVEL, TWO
from perturn.study.tables.study_records import RecordedStudy, read_recorded
from perturn.study.tables.verdict_text import WORDS, p_value, points, sentences
from perturn.study.tables.verdicts import summary_of

_OWN = Path(__file__).parent / "assets"
_CODE = [*(ASSETS / f"{name}.js" for name in ("core", "nav", "figures", "tables")), _OWN / "study.js"]
_STYLES = [ASSETS / "base.css", ASSETS / "report.css"]


def write_study_page(folder: Path) -> Path:
    """Write `summary.json`, `report.html` and `table.md` of a study, each atomically.

    Args:
        folder: Folder of the study, which may be unfinished.

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
    compact = json.dumps(summary, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    write_whole(paths.summary, f"{compact}\n")  # table.md and the page are for people
    write_whole(folder / "table.md", tables(summary), errors="backslashreplace")
    write_whole(paths.page, html, errors="backslashreplace")
    return paths.page


def page(study: RecordedStudy, summary: Mapping[str, Any]) -> str:
    """Fill the template of the page.

    Args:
        study: The study.
        summary: Numbers of the study, as returned by `verdicts.summarize`.

    Returns:
        The HTML of the whole page, which loads nothing from elsewhere.
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
    """Return a point as short text, with only the last part of each key."""
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in point.items())


def _shown(study: RecordedStudy, name: str, number: int, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of an environment that the template reads, which extends the summary."""
    methods: Sequence[Mapping[str, Any]] = found["methods"]
    style = study_figures.styles([row["method"] for row in methods], study.baseline)
    pairs = _comparisons(found, study.baseline)
    played = {row["method"]: study.played("test", name, row["method"]) for row in methods}
    by_length = (
        "Test episodes of all seeds, 95\u00a0% intervals, clustered by task where a task has several episodes. If "
        "success ends an episode, successful episodes are shorter."
    )
    return {
        "protocol_line": number_text.protocol_line(found["protocol"]) if found["protocol"] else "",
        "pairs": pairs,
        "how_to_read": how_to_read(found["comparisons"], found["measures"], _bases(found)),
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


def _comparisons(found: Mapping[str, Any], baseline: str) -> list[dict[str, Any]]:
    """Return all comparisons of an environment, with names; a comparison with the baseline has the method's name."""
    measures, methods = found["measures"], {row["method"] for row in found["methods"]}
    return [
        {"name": row["method"], "method": row["method"]} | {each: row[each]["against"] for each in measures}
        for row in found["methods"]
    ] + [
        {"name": f"{row['method']} against {row['other']}", **row}
        for row in (*found["primary"], *found["further"])
        if row["other"] != baseline or row["method"] not in methods
    ]


def _reading(measure: str) -> str:
    unit = "points of success" if measure == "success" else "score"
    return (
        f"In {unit}, paired by task and seed. Diamonds: all seeds, 95\u00a0% interval, which is wider "
        "for a primary comparison, as in its table. Bars: single seeds."
    )


def _curves(
    tuning: Sequence[Mapping[str, Any]], number: int, style: Mapping[str, Mapping[str, str]]
) -> Iterator[Figure]:
    for index, key in enumerate(study_figures.swept_keys(tuning)):
        caption = (
            "Success on the tuning tasks, with 95\u00a0% intervals. The large mark is the tested setting."
        )
        yield from draw(
            f"tuning-{number}-{index}",
            f"Success against {key}",
            caption,
            study_figures.tuning_curve(tuning, key, style),
        )


_SIZE = "tasks × seeds"
_COMPARED = ("p", "q", "smallest detectable", "verdict")
_BAR = r"\|"
"""Escaped bar, which does not end a cell of a table."""
_TAG = re.compile(r"<(?=[\w/!?])")
"""Pattern of the beginning of an HTML tag."""


def tables(summary: Mapping[str, Any]) -> str:
    """Return the tables of each environment: methods, primary and further comparisons, and notes on the numbers.

    Args:
        summary: Numbers of the study, as returned by `verdicts.summarize`.

    Returns:
        Markdown without headings, so that it fits below any heading.
    """
    parts = [
        part
        for name, found in summary["environments"].items()
        for part in _environment(name, found, summary["baseline"])
    ]
    failed, waiting = summary["cells"]["failed"], summary["cells"]["to do"]
    if failed or waiting:
        parts.append(f"Not finished: {failed} failed cells, {waiting} cells left to do.")
    return "\n\n".join(parts) + "\n"


def _environment(name: str, found: Mapping[str, Any], baseline: str) -> Iterator[str]:
    """Yield the sections of an environment, to be separated by empty lines."""
    protocol = f": {protocol_line(found['protocol'])}" if found["protocol"] else ""
    yield _plain(f"**{name}**{protocol}.")
    for measure in found["measures"]:
        level, unit = ("success, %", "points") if measure == "success" else (measure, measure)
        if found["primary"]:
            head = (
                "primary comparison",
                _SIZE,
                f"difference, {unit}",
                "p (Holm)",
                "smallest detectable",
                "verdict",
            )
            yield _table(head, [_primary(row, measure) for row in found["primary"]])
        rows = [_method(row, measure, baseline) for row in found["methods"]]
        yield _table(("method", "setting", _SIZE, level, f"against {baseline}, {unit}", *_COMPARED), rows)
        if found["further"]:
            rows = [_further(row, measure) for row in found["further"]]
            yield _table(("A against B", _SIZE, f"A − B, {unit}", *_COMPARED), rows)
    yield how_to_read(found["comparisons"], found["measures"], _bases(found))
    if found["notes"]:
        yield "\n".join(f"- {_plain(note)}" for note in found["notes"])


def _bases(found: Mapping[str, Any]) -> set[int]:
    """Return the numbers of bases, or of seeds with a base each, of the comparisons in an environment."""
    measures: Sequence[str] = found["measures"]
    compared = [row[measure]["against"] for row in found["methods"] for measure in measures]
    compared += [row[measure] for row in (*found["primary"], *found["further"]) for measure in measures]
    return {len(each["by_base"]) for each in compared if each}


def how_to_read(comparisons: Mapping[str, int], measures: Sequence[str], bases: Collection[int]) -> str:
    """Return an explanation of the numbers on the page.

    Args:
        comparisons: Number of comparisons in each family.
        measures: Compared measures. The p-values of each measure are corrected separately.
        bases: Numbers of bases, or of seeds with a base each, that the comparisons have.
    """
    if set(bases) == {TWO}:
        return "Methods are paired by task and seed."
    primary, others = (comparisons[family] for family in ("primary", "others"))
    each = ", each measure by itself" if len(measures) > 1 else ""
    covered = "other tasks" if set(bases) == {1} else "other seeds and other tasks"
    said = (
        f"Intervals (95 %) and p are for a single comparison. They cover {covered}. Methods are paired by task and "
        "seed. "
    )
    if others:
        said += f"q is the Benjamini-Hochberg q-value over {_counted(others)}{each}. "
    if primary:
        level = f"{100 * (1 - LEVEL / primary):.3g} %"
        said += (
            f"Primary comparisons have Holm's correction over {_counted(primary)}{each}. Their intervals are at "
            f"{level}, so that all of them hold in 95 % of studies. "
        )
    return f"{said}Smallest detectable: the true difference that such a study finds in four of five cases."


def _counted(comparisons: int) -> str:
    return f"{comparisons} {'comparison' if comparisons == 1 else 'comparisons'}"


def _method(row: Mapping[str, Any], measure: str, baseline: str) -> list[str]:
    """Return the row of a method: its mean, and its comparison with the baseline."""
    found = row[measure]
    verdict = "baseline" if row["method"] == baseline else "–" if row["episodes"] else "no episode"
    return [
        row["method"],
        point_text(row["point"]),
        _size(row["tasks"], len(row["seeds"]), row["bases"]),
        "–" if found["mean"] is None else _mean(found, measure),
        *_comparison(found["against"], measure, verdict),
    ]


def _primary(row: Mapping[str, Any], measure: str) -> list[str]:
    """Return the row of a primary comparison. Its interval and p-value are corrected for the family."""
    found, name = row[measure], f"{row['method']} against {row['other']}"
    if found is None:
        return [name, "–", "–", "–", "–", "not compared"]
    difference, seen, verdict = _difference(found, "family_interval", measure)
    return [name, _size_of(found), difference, p_value(found["corrected"]), seen, verdict]


def _further(row: Mapping[str, Any], measure: str) -> list[str]:
    """Return the row of a further comparison."""
    found = row[measure]
    size = _size_of(found) if found else "–"
    return [f"{row['method']} against {row['other']}", size, *_comparison(found, measure, "not compared")]


def _comparison(found: Mapping[str, Any] | None, measure: str, verdict: str) -> list[str]:
    """Return cells of a table: difference, p, q, smallest detectable difference, and verdict."""
    if found is None:
        return ["–", "–", "–", "–", verdict]
    q = {"primary": "primary", "others": p_value(found["corrected"])}.get(found["family"], "–")
    difference, *rest = _difference(found, "interval", measure)
    return [difference, p_value(found["p_value"]), q, *rest]


def _difference(found: Mapping[str, Any], interval: str, measure: str) -> tuple[str, str, str]:
    """Return cells of a table: the difference with its interval, the smallest detectable difference, the verdict."""
    if found["p_value"] is None:
        both = " and ".join(_signed(each, measure) for each in found["by_base"])
        return both, "–", WORDS[found["verdict"]]
    smallest = found["smallest_difference"]
    said = _estimate(found["mean_difference"], found[interval], measure, _signed)
    return said, "–" if smallest is None else _level(smallest, measure), WORDS[found["verdict"]]


def _mean(found: Mapping[str, Any], measure: str) -> str:
    """Return a mean with its interval. With two base models, return their two means instead of the interval."""
    if len(found["by_base"]) == TWO:
        return f"{_level(found['mean'], measure)} ({', '.join(_level(each, measure) for each in found['by_base'])})"
    return _estimate(found["mean"], found["interval"], measure, _level)


def _size_of(found: Mapping[str, Any]) -> str:
    return _size(found["tasks"], len(found["seeds"]), len(found["seeds_by_base"]))


def _size(tasks: int, seeds: int, bases: int) -> str:
    own = f", {bases} base{'' if bases == 1 else 's'}" if bases < seeds else ""
    return f"{tasks} × {seeds}{own}"


def _estimate(
    mean: float, ends: Sequence[float | None], measure: str, said: Callable[[float | None, str], str]
) -> str:
    """Return a number with its interval as text."""
    low, high = (said(end, measure) for end in ends)
    return f"{said(mean, measure)} [{low}, {high}]"


def _level(value: float | None, measure: str) -> str:
    if value is None:
        return "?"
    return f"{100 * value:.1f}" if measure == "success" else f"{value:.3f}"


def _signed(value: float | None, measure: str) -> str:
    return points(value, measure).replace("-", "−")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *others = (
        f"| {' | '.join(_plain(cell).replace('|', _BAR) for cell in line)} |" for line in (head, *rows)
    )
    return "\n".join([first, f"|{'---|' * len(head)}", *others])


def _plain(text: str) -> str:
    """Return a text on one line and with escaped HTML."""
    return _TAG.sub("&lt;", " ".join(text.split()))
