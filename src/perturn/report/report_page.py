"""Build the self-contained page of the report from its frame, scripts and templates."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from perturn.analysis import number_text
from perturn.analysis.episode_numbers import EpisodeNumbers
from perturn.analysis.iteration_table import not_over, unbalanced, unit_of
from perturn.analysis.run_comparison import against_first, flat, names_of, settings_that_differ
from perturn.analysis.run_contents import RecordedRun
from perturn.analysis.run_summary import headline, set_rows, signal_rows
from perturn.data.iteration_numbers import is_number
from perturn.data.run_paths import iteration_of
from perturn.episodes.triage_signals import meaning
from perturn.report import figures
from perturn.report.credit_figures import against_own
from perturn.report.episode_index import Catalogue, Piece
from perturn.report.episode_view import shown_group
from perturn.report.measured import measured
from perturn.report.report_sections import draw, script_json, sections
from perturn.stats import Estimate, cluster_interval

ASSETS = Path(__file__).parent / "assets"
_THEMES = {"light": figures.theme("#1f2933", "#dfe3e8"), "dark": figures.theme("#dde2e8", "#3a424d")}
_FILTERS = (
    number_text.number,
    number_text.percent,
    number_text.significant,
    number_text.interval,
    number_text.time,
    number_text.short,
    number_text.count,
)

RUN_FILTERS = (meaning, number_text.comparison_sentences)
"""Template filters that only the pages of runs use."""


def fill(
    template: str,
    values: dict[str, Any],
    *,
    style: Iterable[Path],
    code: Iterable[Path],
    filters: Iterable[Callable[..., Any]] = (),
    assets: Sequence[Path] = (ASSETS,),
) -> str:
    """Fill a template that extends `shell.html.j2`.

    Args:
        template: Name of the template.
        values: Variables of the template.
        style: Style files, in order.
        code: Script files, in order.
        filters: Template filters, in addition to the functions of `analysis.number_text`.
        assets: Folders that are searched for templates.

    Returns:
        The HTML of the whole page, which loads nothing from elsewhere.
    """
    library, boot = get_plotlyjs(), script(code)
    sheet = "\n".join(file.read_text(encoding="utf-8") for file in style)
    environment = _environment(tuple(assets), (*_FILTERS, *filters))
    frame = {
        "themes": script_json(json.dumps(_THEMES)),
        "library": _packed(library),
        "style": Markup(sheet),
        "boot": Markup(boot),
        "policy": _content_policy(sheet, (library, boot)),
    }
    return environment.get_template(template).render(frame | values)


def _blank(value: Any) -> Any:
    """Return the value that a template prints: nothing for None, so that tables sort a missing value last."""
    return "" if value is None else value


@cache
def _environment(assets: tuple[Path, ...], filters: tuple[Callable[..., Any], ...]) -> Environment:
    """Return the template environment of some folders. Each template is compiled once."""
    made = Environment(
        loader=FileSystemLoader(assets), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=_blank,
    )  # fmt: skip
    made.filters |= {function.__name__: function for function in filters}
    return made


def script(code: Iterable[Path]) -> str:
    """Return the script of the page: its files joined into one scope."""
    parts = [file.read_text(encoding="utf-8") for file in code]
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


def _content_policy(style: str, scripts: Sequence[str]) -> str:
    """Return the content-security policy of the page: only its own scripts and style run, and nothing is loaded.

    Plotly creates an empty style element and adds rules to it, so the policy allows the hash of an empty style. Plotly
    also sets style attributes on the elements that it draws.
    """
    hashes = " ".join(_hash(each) for each in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src {_hash(style)} {_hash('')}; "
        "style-src-attr 'unsafe-inline'; img-src data:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types perturn"
    )


@cache
def _packed(library: str) -> Piece:
    packed = gzip.compress(library.encode("utf-8"), 9, mtime=0)
    return Piece("library", base64.b64encode(packed).decode("ascii"))


def _hash(content: str) -> str:
    digest = base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode("ascii")
    return f"'sha256-{digest}'"


CODE = [
    ASSETS / f"{name}.js"
    for name in (
        *(
            "core",
            "nav",
            "route",
            "data",
            "figures",
            "tables",
            "tokens",
            "episode",
            "align",
            "group",
            "list",
            "browser",
        ),
        "boot",
    )
]
"""Script files of the page, in the order in which they are joined."""
_STYLES = [ASSETS / f"{name}.css" for name in ("base", "report", "episodes")]


def page(runs: Sequence[RecordedRun], summaries: Sequence[Mapping[str, Any]]) -> str:
    """Fill the template of the page.

    Args:
        runs: Contents of the run folders. Further runs are compared with the first.
        summaries: Numbers of the runs, as returned by `report.summarize`.

    Returns:
        The HTML of the whole page, which loads nothing from elsewhere.
    """
    names = names_of(runs)
    versus = against_first(runs, names)
    catalogue = Catalogue()
    cut = [catalogue.add(run, name) for run, name in zip(runs, names, strict=True)]
    values = {
        "title": " · ".join(names),
        "runs": [
            _run(run, name, number, row) | {"notes": [*_notes(run, row), *cut[number]]}
            for number, (run, name, row) in enumerate(zip(runs, names, summaries, strict=True))
        ],
        "versus": versus,
        "sections": sections(dict(zip(names, runs, strict=True)), dict(zip(names, summaries, strict=True))),
        "differences": settings_that_differ([flat(_settings(run)) for run in runs]),
        "pieces": catalogue.pieces([each.sides[::-1] for each in versus if each.row]),
    }
    return fill(
        "report.html.j2",
        values,
        style=_STYLES,
        code=CODE,
        filters=RUN_FILTERS,
    )


def _notes(run: RecordedRun, summary: Mapping[str, Any]) -> list[str]:
    return [*run.notes, *unbalanced(summary["iterations"]), *not_over(summary["iterations"])]


def _run(run: RecordedRun, name: str, number: int, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of one run in the format of the templates."""
    sets = {f"evaluation of {policy}": items for policy, items in run.evaluation.items()}
    sets |= {"exploration": run.over} if run.over else {}
    stages = by_stem(run.stages)
    return {
        "name": name,
        "recipe_name": run.manifest.get("recipe") or name,
        "policies": [
            row
            | {
                "set": f"{name}/{run.evaluated(row['name'])}",
                "invalid_interval": _invalid(run.evaluation[row["name"]]),
            }
            for row in summary["policies"]
        ],
        "headline": headline(summary),
        "sentence": number_text.comparison_sentences(summary["comparison"]),
        "seconds": summary["seconds"],
        "data": set_rows(run),
        "signal_sets": list(sets),
        "signals": signal_rows(sets),
        "counts": [
            {
                "stage": stage,
                "counts": [
                    (key.replace("_", " "), number_text.count(value)) for key, value in counts.items()
                ],
            }
            for stage, note in stages.items()
            if (counts := note["counts"])
        ],
        "costs": [
            {
                "stage": stage,
                "seconds": note["seconds"],
                "memory": note["peak_memory_gb"],
                "tokens": _tokens(note["counts"]),
            }
            for stage, note in stages.items()
        ],
        "iterations": summary["iterations"],
        "bins": _bins(summary["iterations"]),
        "unit": unit_of(summary["iterations"]),
        "group": _group(run, name, number),
        "protocol": flat(run.protocol or {}),
        "protocol_line": number_text.protocol_line(run.protocol or {}),
        "cost_lines": number_text.cost_lines(summary["policies"]),
        "error_lines": number_text.error_lines(summary["policies"]),
        "provenance": flat({key: value for key, value in run.manifest.items() if key != "stages"}),
        "commit": str(run.manifest.get("commit") or ""),
        "recipe": run.recipe,
        "loss": flat(run.loss),
        "credits": against_own(run.explored, run.credits),
        "measured": measured(run.paths),
    }


def _bins(iterations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the display names of the bins that are not empty in any iteration."""
    ledgers = [row["ledger"]["bins"] for row in iterations if row["ledger"]]
    return list(dict.fromkeys(name.replace("_", " ") for bins in ledgers for name, n in bins.items() if n))


def _group(run: RecordedRun, name: str, number: int) -> dict[str, Any] | None:
    group = shown_group(run, name)
    if group is None:
        return None
    caption = "Each row is a sample, each cell a turn, coloured by its weight."
    drawn = draw(f"group-{number}", "Weight of each turn", caption, figures.group_map(group["samples"]))
    return group | {"figure": drawn}


def _settings(run: RecordedRun) -> dict[str, Any]:
    """Return the settings that can explain differences between runs: recipe, protocol, versions and commit."""
    return {
        "recipe": run.settings,
        "protocol": run.protocol or {},
        "versions": run.manifest.get("versions") or {},
        "commit": run.manifest.get("commit") or "",
    }


def _invalid(episodes: Sequence[EpisodeNumbers]) -> Estimate | None:
    """Return the share of invalid actions, with an interval clustered by task; None without turns."""
    turns = [(one.task, invalid) for one in episodes for invalid in one.invalid]
    if not turns:
        return None
    return cluster_interval([float(invalid) for _, invalid in turns], [task for task, _ in turns])


def _tokens(counts: Mapping[str, Any]) -> str:
    """Return the token counts of a stage as text."""
    found = [(key, value) for key, value in counts.items() if "token" in key and is_number(value)]
    return ", ".join(f"{number_text.count(value)} {key.replace('_', ' ')}" for key, value in found) or "–"


def by_stem(stages: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Merge the stages of all iterations into one row for each kind of stage.

    Args:
        stages: Stages in the manifest.

    Returns:
        Rows by name, such as `explore, 60 times`. `seconds` and whole-number `counts` are sums. `peak_memory_gb` and
        counts that end in `_most` are the maximum. Counts that are shares or means are averaged over the stages that
        have them. A text is kept if it is equal in all stages.
    """
    together: dict[str, list[str]] = {}
    for name in stages:
        stem = name if iteration_of(name) is None else name.rpartition("-")[0]
        together.setdefault(stem, []).append(name)
    return {
        names[0] if len(names) == 1 else f"{stem}, {len(names)} times": _sum([stages[name] for name in names])
        for stem, names in together.items()
    }


def _sum(notes: list[Mapping[str, Any]]) -> dict[str, Any]:
    if len(notes) == 1:
        return {
            "seconds": notes[0].get("seconds"),
            "peak_memory_gb": notes[0].get("peak_memory_gb"),
            "counts": notes[0].get("counts") or {},
        }
    counts: dict[str, Any] = {}
    means: dict[str, list[float]] = {}
    for note in notes:
        for key, value in (note.get("counts") or {}).items():
            if isinstance(value, float) and is_number(value):
                means.setdefault(key, []).append(value)
                counts[key] = mean(means[key])
            elif is_number(value):
                together = max if key.endswith("_most") else operator.add
                counts[key] = together(counts.get(key, 0), value)
            elif all((each.get("counts") or {}).get(key) == value for each in notes):
                counts[key] = value
    return {
        "seconds": sum(float(note.get("seconds") or 0) for note in notes),
        "peak_memory_gb": max(float(note.get("peak_memory_gb") or 0) for note in notes),
        "counts": counts,
    }
