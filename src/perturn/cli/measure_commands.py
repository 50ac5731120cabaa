"""Command `measure`, which measures the advantage of each turn, and how well each credit agrees with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from shlex import quote
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from perturn.cli._base import AsJson, Source, command, results, say_json
from perturn.errors import by_reason, check_belongs
from perturn.table import locate

LEFT_OUT = {"loss_found", "step_cosine"}
"""Scores that only the report shows, so that each table in the terminal fits 80 columns."""


@command(
    "measure",
    "runs/demo",
    "runs/demo --credits rloo,gigpo,anchor-rloo --episodes 50 --continuations 16",
    "runs/demo --dry-run --width 0.1",
    "runs/demo --credits my_package.my_credit:MyCredit --json",
    panel="Look",
)
def measure(
    source: Source,
    credits: Annotated[
        str, typer.Option(help="Credits, with commas; all: each that can be computed.")
    ] = "all",
    episodes: Annotated[int, typer.Option(help="Episodes to measure.")] = 100,
    continuations: Annotated[int, typer.Option(help="Continuations from each point; at least 4.")] = 8,
    iteration: Annotated[
        int | None, typer.Option(help="Iteration; default: the last whose policy was kept.")
    ] = None,
    width: Annotated[
        float | None, typer.Option(help="Half-width of an interval, for --dry-run; default: 0.1.")
    ] = None,
    gradients: Annotated[
        bool | None,
        typer.Option("--gradients/--no-gradients", help="Also compare the policy gradients; default: yes."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how many continuations are needed, and measure nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure the advantage of each turn; rate credits by it."""
    names = [name.strip() for name in credits.split(",") if name.strip()]
    check_belongs({"--width": width}, dry_run, "--dry-run", "add it, or leave --width out")
    check_belongs(
        {"--gradients": gradients is not None}, not dry_run, "a measurement", "leave it out with --dry-run"
    )
    locate("perturn.data.run_folder:resolve_recipe")(source)  # a wrong path is told before heavy imports
    wanted = locate("perturn.measure.measure_run:Wanted")(
        names, episodes, continuations, iteration, 0.1 if width is None else width, gradients is not False
    )
    if dry_run:
        planned = asdict(locate("perturn.measure.measure_run:forecast_run")(source, wanted))
        if as_json:
            say_json(planned)
        else:
            _print_forecast(planned)
        return
    found = locate("perturn.measure.measure_run:measure_run")(source, wanted)
    if as_json:
        say_json(found)
    else:
        _print(found)
        run = locate("perturn.data.run_folder:run_folder")(
            locate("perturn.data.run_folder:resolve_recipe")(source)
        )
        results.print(
            f"each turn of an episode: perturn report {quote(str(run))}", markup=False, soft_wrap=True
        )


def _print_forecast(planned: Mapping[str, Any]) -> None:
    source = "continuations from each point" if planned["from_pilot"] else "whole episodes of each task"
    results.print(
        f"No width can be forecast, since the returns of {source} are equal. Explore tasks that the policy solves "
        "only sometimes."
        if planned["width"] is None
        else f"With {planned['continuations']} continuations from each point, the 95 % interval of an advantage will "
        f"be about ±{planned['width']:.2f}. An interval of ±{planned['wanted']:g} needs {planned['needed']} "
        f"continuations, by the returns of {source}.",
        soft_wrap=True,
    )
    results.print(
        f"{planned['episodes']} episodes with {planned['turns']} turns have {planned['points']} points; "
        f"{planned['to_play']} continuations of about {planned['turns_to_play']} turns in all are left to play. "
        f"{_answers(planned['world'])}.",
        soft_wrap=True,
    )


def _answers(world: Mapping[str, Any]) -> str:
    """Return a sentence on the kind of the environment, with the evidence."""
    return (
        f"The environment is {world['kind']}: {world['came_back']} of {world['episodes']} replayed episodes gave the "
        "same observations"
    )


def _print(found: Mapping[str, Any]) -> None:
    for sentence in found["sentences"] or ["No credit is shown to be better or worse than chance."]:
        results.print(sentence, style="bold", markup=False, highlight=False, soft_wrap=True)
    if found["sentences"]:
        compared = len(found["credits"].keys() - {locate("perturn.measure.measure_run:MEASURED")})
        results.print(
            "Each sentence is about one credit alone. It is not corrected for the comparison of "
            f"{compared} credits, of which some may seem better or worse by chance.",
            soft_wrap=True,
        )
    counts = locate("perturn.report.measured:counts_said")(found)
    results.print(f"{counts} {_answers(found['world'])}.", soft_wrap=True)
    headings = locate("perturn.report.score_headings:HEADINGS")
    of_turns, of_gradients = (
        {
            key: name
            for key, name in locate(f"perturn.report.score_headings:{table}").items()
            if key not in LEFT_OUT
        }
        for table in ("OF_TURNS", "OF_GRADIENTS")
    )
    unscored = locate("perturn.measure.conclusions:unscored")
    has_gradients = any(row.get(key) for row in found["credits"].values() for key in of_gradients)
    if why := unscored(found["credits"].values(), of_turns):
        results.print(why, soft_wrap=True)
    else:
        title = f"weights of each credit compared with the measured advantage A, on {found['environment']}"
        results.print(_table(title, of_turns, found))
    if has_gradients:
        title = (
            "policy gradient of each credit compared with the gradient of A; cost: model passes per episode"
        )
        results.print(_table(title, of_gradients, found, cost=True))
    for name, row in found["credits"].items():
        for figure, why in row.get("withheld", {}).items():
            results.print(f"{name} has no {headings[figure]}: {why}", markup=False, soft_wrap=True)
    for same in by_reason(list(found["left_out"].items()), lambda one: one[1].replace(f" {one[0]} ", " ")):
        names = ", ".join(name for name, _ in same)
        results.print(f"left out {names}: {same[0][1]}", style="dim", markup=False, soft_wrap=True)


def _table(title: str, columns: Mapping[str, str], found: Mapping[str, Any], *, cost: bool = False) -> Table:
    shown = Table(
        box=None,
        padding=(0, 1, 0, 0),
        title=escape(f"{title}; below each value its 95 % interval"),
        title_justify="left",
    )
    shown.add_column("credit", no_wrap=True)
    for column in (*columns.values(), *(["cost"] if cost else [])):
        shown.add_column(column, overflow="fold")
    for name, row in found["credits"].items():
        cells = [_cell(row.get(key)) for key in columns]
        if set(cells) == {"-"} and not cost:  # the measured advantage is not scored against itself
            continue
        shown.add_row(escape(name), *cells, *([f"{row['cost']:.1f}"] if cost else []))
    return shown


def _cell(estimate: Any) -> str:
    if not estimate or estimate[1] is estimate[2] is None:  # without an interval, a mean shows nothing
        return "-"
    mean, low, high = ("?" if each is None else f"{each:.2f}" for each in estimate)
    if estimate[1] == estimate[2]:
        return mean
    return f"{mean}\n{low} {high}"
