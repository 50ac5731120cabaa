"""The page of the report: what the templates in `assets/` are given, and how they are filled."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from perturn.data.iterations import is_number
from perturn.report import figures, text
from perturn.report.credits import against_own
from perturn.report.episodes import Catalogue, Piece
from perturn.report.folder import RecordedRun
from perturn.report.groups import shown_group
from perturn.report.iterations import unbalanced
from perturn.report.sections import draw, script_json, sections
from perturn.report.signals import meaning
from perturn.report.stages import by_stem
from perturn.report.summary import set_rows, signal_rows
from perturn.report.versus import against_first, flat, names_of, settings_that_differ
from perturn.stats import Estimate, cluster_interval
from perturn.types import Trajectory

_ASSETS = Path(__file__).parent / "assets"
_CODE = [
    "core",
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
    "boot",
]
"""Files of the page's script, in the order they are joined."""
_STYLES = ("base", "report", "episodes")
_THEMES = {"light": figures.theme("#1f2933", "#dfe3e8"), "dark": figures.theme("#dde2e8", "#3a424d")}


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
    library, boot = get_plotlyjs(), script()
    style = "\n".join((_ASSETS / f"{name}.css").read_text(encoding="utf-8") for name in _STYLES)
    return (
        _templates()
        .get_template("report.html.j2")
        .render(
            title=" · ".join(names),
            runs=[
                _run(run, name, number, row)
                for number, (run, name, row) in enumerate(zip(runs, names, summaries, strict=True))
            ],
            versus=versus,
            sections=sections(dict(zip(names, runs, strict=True)), dict(zip(names, summaries, strict=True))),
            differences=settings_that_differ([flat(_settings(run)) for run in runs]),
            pieces=catalogue.pieces([each.sides for each in versus if each.row]),
            themes=script_json(json.dumps(_THEMES)),
            library=_packed(library),
            style=Markup(style),
            boot=Markup(boot),
            policy=_content_policy(style, (library, boot)),
        )
    )


def script() -> str:
    """The page's own script: the files of `assets/`, joined into one scope."""
    parts = [(_ASSETS / f"{name}.js").read_text(encoding="utf-8") for name in _CODE]
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    own = (text.number, text.percent, text.interval, text.time, text.short, text.count, meaning)
    environment.filters |= {function.__name__: function for function in own}
    environment.filters["sentence"] = text.comparison_sentences
    return environment


def _run(run: RecordedRun, name: str, number: int, summary: Mapping[str, Any]) -> dict[str, Any]:
    """One run as the templates read it."""
    sets = {f"evaluation of {policy}": items for policy, items in run.evaluation.items()}
    stages = by_stem(run.stages)
    sets = {key: items for key, items in [*sets.items(), ("exploration", run.explored)] if items}
    return {
        "name": name,
        "recipe_name": run.manifest.get("recipe") or name,
        "notes": [*run.notes, *unbalanced(summary["iterations"])],
        "policies": [
            row
            | {
                "set": f"{name}/{run.evaluated(row['name'])}",
                "invalid_interval": _invalid(run.evaluation[row["name"]]),
            }
            for row in summary["policies"]
        ],
        "sentence": text.comparison_sentences(summary["comparison"]),
        "seconds": summary["seconds"],
        "data": set_rows(run),
        "signal_sets": list(sets),
        "signals": signal_rows(sets),
        "counts": [
            {
                "stage": stage,
                "counts": [(key.replace("_", " "), text.count(value)) for key, value in counts.items()],
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
        "group": _group(run, name, number),
        "protocol": flat(run.protocol or {}),
        "protocol_line": text.protocol_line(run.protocol or {}),
        "provenance": flat({key: value for key, value in run.manifest.items() if key != "stages"}),
        "commit": str(run.manifest.get("commit") or ""),
        "recipe": run.recipe,
        "loss": flat(run.loss),
        "credits": against_own(run.explored, run.credits),
    }


def _bins(iterations: Sequence[Mapping[str, Any]]) -> list[str]:
    """The bins that hold an episode of any iteration, as the page names them."""
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


def _content_policy(style: str, scripts: Sequence[str]) -> str:
    """Only our two scripts and our style run; nothing is fetched, and no text becomes markup.

    Plotly makes an empty style element and adds rules to it, hence the hash of the empty style, and sets style
    attributes on what it draws.
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


def _invalid(trajectories: Sequence[Trajectory]) -> Estimate | None:
    """Share of invalid actions; turns of one trajectory are not independent."""
    turns = [(index, turn) for index, trajectory in enumerate(trajectories) for turn in trajectory.turns]
    if not turns:
        return None
    return cluster_interval([float(not turn.valid) for _, turn in turns], [index for index, _ in turns])


def _tokens(counts: Mapping[str, Any]) -> str:
    """Counts of tokens, as the stage named them."""
    found = [(key, value) for key, value in counts.items() if "token" in key and is_number(value)]
    return ", ".join(f"{text.count(value)} {key.replace('_', ' ')}" for key, value in found) or "–"
