"""The command measure: what each turn was worth, and how well each credit finds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from perturn.cli._base import AsJson, RunFolder, command, results, say_json
from perturn.table import locate

LEFT_OUT = {"loss_found", "step_cosine"}
"""Scores that the report has and the terminal leaves out, so that each table fits 80 columns."""


@command(
    "measure",
    "runs/demo",
    "runs/demo --credits rloo,gigpo,anchor-rloo --episodes 50 --continuations 16",
    "runs/demo --dry-run --width 0.1",
    "runs/demo --credits my_package.my_credit:MyCredit --json",
    panel="Look",
)
def measure(
    run: RunFolder,
    credits: Annotated[str, typer.Option(help="Names, with commas; all: each that can.")] = "all",
    episodes: Annotated[int, typer.Option(help="Episodes to measure.")] = 100,
    continuations: Annotated[int, typer.Option(help="Continuations from each point.")] = 8,
    iteration: Annotated[int | None, typer.Option(help="Default: the last whose policy is there.")] = None,
    width: Annotated[float, typer.Option(help="Half-width of an interval, for --dry-run.")] = 0.1,
    gradients: Annotated[bool, typer.Option(help="Compare gradients of the policy.")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how many continuations an interval needs.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure what turns were worth, and how well credits find it."""
    names = [name.strip() for name in credits.split(",") if name.strip()]
    wanted = locate("perturn.measure.measure_run:Wanted")(
        names, episodes, continuations, iteration, width, gradients
    )
    if dry_run:
        planned = asdict(locate("perturn.measure.measure_run:forecast_run")(run, wanted))
        if as_json:
            say_json(planned)
        else:
            _print_forecast(planned)
        return
    found = locate("perturn.measure.measure_run:measure_run")(run, wanted)
    if as_json:
        say_json(found)
    else:
        _print(found)
        results.print(f"turn by turn: perturn report {run}", markup=False, soft_wrap=True)


def _print_forecast(planned: Mapping[str, Any]) -> None:
    source = "continuations that were played" if planned["from_pilot"] else "whole episodes of a task"
    results.print(
        f"{_answers(planned['world'])}. {planned['episodes']} episodes of {planned['turns']} turns have "
        f"{planned['points']} points. "
        f"{planned['continuations']} continuations from each leave {planned['to_play']} to play, about "
        f"{planned['turns_to_play']} turns.",
        soft_wrap=True,
    )
    results.print(
        f"By the variance of {source}, the 95 % interval of an advantage will be ±{planned['width']:.2f}; for "
        f"±{planned['wanted']:g} it needs {planned['needed']} continuations.",
        soft_wrap=True,
    )


def _answers(world: Mapping[str, Any]) -> str:
    """Return how the world answers, and the evidence."""
    return (
        f"The world is {world['kind']} ({world['came_back']} of {world['episodes']} episodes went as before)"
    )


def _print(found: Mapping[str, Any]) -> None:
    results.print(
        f"{found['measured']} of {found['turns']} turns of {found['episodes']} episodes, {found['tasks']} tasks, "
        f"{found['continuations']} continuations. {_answers(found['world'])}.",
        soft_wrap=True,
    )
    headings = locate("perturn.report.score_headings:HEADINGS")
    of_turns, of_gradients = (
        {
            key: name
            for key, name in locate(f"perturn.report.score_headings:{table}").items()
            if key not in LEFT_OUT
        }
        for table in ("OF_TURNS", "OF_GRADIENTS")
    )
    unscored = locate("perturn.measure.sentences:unscored")
    if why := unscored(found["credits"].values(), of_turns):
        results.print(why, soft_wrap=True)
    else:
        results.print(
            _table(f"turns against the measured advantage, {found['environment']}", of_turns, found)
        )
    results.print(
        _table("gradients of the policy, and passes over an episode", of_gradients, found, cost=True)
    )
    for name, row in found["credits"].items():
        for figure, why in row.get("withheld", {}).items():
            results.print(f"{name} has no {headings[figure]}: {why}", markup=False, soft_wrap=True)
    for sentence in found["sentences"]:
        results.print(sentence, markup=False, soft_wrap=True)
    for name, why in found["left_out"].items():
        results.print(f"left out {name}: {why}", markup=False, soft_wrap=True)


def _table(title: str, columns: Mapping[str, str], found: Mapping[str, Any], *, cost: bool = False) -> Table:
    shown = Table(
        box=None, padding=(0, 1, 0, 0), title=escape(f"{title}, 95 % intervals"), title_justify="left"
    )
    shown.add_column("credit", no_wrap=True)
    for column in (*columns.values(), *(["cost"] if cost else [])):
        shown.add_column(column, overflow="fold")
    for name, row in found["credits"].items():
        cells = [_cell(row.get(key)) for key in columns]
        if cost or set(cells) != {"-"}:
            shown.add_row(escape(name), *cells, *([f"{row['cost']:.1f}"] if cost else []))
    return shown


def _cell(estimate: Any) -> str:
    if not estimate:
        return "-"
    mean, low, high = ("?" if each is None else f"{each:.2f}" for each in estimate)
    return f"{mean}\n{low} {high}"
