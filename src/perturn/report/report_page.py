"""The page of the report: what the templates in `assets/` are given, and how they are filled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perturn.analysis import number_text
from perturn.analysis.headline import headline
from perturn.analysis.iteration_table import not_over, unbalanced, unit_of
from perturn.analysis.run_comparison import against_first, flat, names_of, settings_that_differ
from perturn.analysis.run_contents import RecordedRun
from perturn.analysis.run_summary import set_rows, signal_rows
from perturn.analysis.stage_list import by_stem
from perturn.data.iteration_numbers import is_number
from perturn.episodes.triage import meaning
from perturn.report import figures
from perturn.report.credit_figures import against_own
from perturn.report.episode_index import Catalogue
from perturn.report.group_view import shown_group
from perturn.report.html_shell import ASSETS, fill
from perturn.report.report_sections import draw, sections
from perturn.stats import Estimate, cluster_interval
from perturn.types import Trajectory

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
"""Files of the page's script, in the order they are joined."""
_STYLES = [ASSETS / f"{name}.css" for name in ("base", "report", "episodes")]


def page(runs: Sequence[RecordedRun], summaries: Sequence[Mapping[str, Any]]) -> str:
    """Fill the templates.

    Args:
        runs: The run folders in memory; the first is the one that others are compared with.
        summaries: Their numbers, as `report.summarize` gives them.

    Returns:
        The whole page, which fetches nothing.
    """
    names = names_of(runs)
    versus = against_first(runs, names)
    catalogue = Catalogue()
    for run, name in zip(runs, names, strict=True):
        catalogue.add(run, name)
    values = {
        "title": " · ".join(names),
        "runs": [
            _run(run, name, number, row)
            for number, (run, name, row) in enumerate(zip(runs, names, summaries, strict=True))
        ],
        "versus": versus,
        "sections": sections(dict(zip(names, runs, strict=True)), dict(zip(names, summaries, strict=True))),
        "differences": settings_that_differ([flat(_settings(run)) for run in runs]),
        "pieces": catalogue.pieces([each.sides for each in versus if each.row]),
    }
    return fill(
        "report.html.j2",
        values,
        style=_STYLES,
        code=CODE,
        filters=(meaning, number_text.comparison_sentences),
    )


def _run(run: RecordedRun, name: str, number: int, summary: Mapping[str, Any]) -> dict[str, Any]:
    """One run as the templates read it."""
    sets = {f"evaluation of {policy}": items for policy, items in run.evaluation.items()}
    stages = by_stem(run.stages)
    sets = {key: items for key, items in [*sets.items(), ("exploration", run.over)] if items}
    return {
        "name": name,
        "recipe_name": run.manifest.get("recipe") or name,
        "notes": [*run.notes, *unbalanced(summary["iterations"]), *not_over(summary["iterations"])],
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
        "provenance": flat({key: value for key, value in run.manifest.items() if key != "stages"}),
        "commit": str(run.manifest.get("commit") or ""),
        "recipe": run.recipe,
        "loss": flat(run.loss),
        "credits": against_own(run.explored, run.credits),
    }


def _bins(iterations: Sequence[Mapping[str, Any]]) -> list[str]:
    """The bins that hold something of any iteration, as the page names them."""
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
    """Possible reasons why two runs differ: recipe, protocol, versions and commit."""
    return {
        "recipe": run.settings,
        "protocol": run.protocol or {},
        "versions": run.manifest.get("versions") or {},
        "commit": run.manifest.get("commit") or "",
    }


def _invalid(trajectories: Sequence[Trajectory]) -> Estimate | None:
    """Share of invalid actions; turns of one trajectory are not independent."""
    turns = [(index, turn) for index, trajectory in enumerate(trajectories) for turn in trajectory.turns]
    if not turns:
        return None
    return cluster_interval([float(not turn.valid) for _, turn in turns], [index for index, _ in turns])


def _tokens(counts: Mapping[str, Any]) -> str:
    """Counts of tokens, as the stage named them."""
    found = [(key, value) for key, value in counts.items() if "token" in key and is_number(value)]
    return ", ".join(f"{number_text.count(value)} {key.replace('_', ' ')}" for key, value in found) or "–"
