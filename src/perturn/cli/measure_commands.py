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

COLUMNS = {
    "correlation": "correlation",
    "auc": "AUC, A > 0",
    "lost_auc": "AUC, lost turn",
    "sign_errors": "sign errors",
    "error_after_scaling": "error",
    "cosine": "cosine",
    "expected_cosine": "expected cosine",
    "signal_to_noise": "signal/noise",
}
"""Scores that are printed, with their headings."""


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
        f"{planned['episodes']} episodes of {planned['turns']} turns have {planned['points']} points. "
        f"{planned['continuations']} continuations from each leave {planned['to_play']} to play, about "
        f"{planned['turns_to_play']} turns.",
        soft_wrap=True,
    )
    results.print(
        f"By the variance of {source}, the 95 % interval of an advantage will be ±{planned['width']:.2f}; for "
        f"±{planned['wanted']:g} it needs {planned['needed']} continuations.",
        soft_wrap=True,
    )


def _print(found: Mapping[str, Any]) -> None:
    world = found["world"]
    results.print(
        f"{found['measured']} of {found['turns']} turns of {found['episodes']} episodes, {found['tasks']} tasks, "
        f"{found['continuations']} continuations; the world is {world['kind']} ({world['came_back']} of "
        f"{world['episodes']} episodes went as before)",
        soft_wrap=True,
    )
    shown = Table(
        title=f"credits against the measured advantage, {escape(found['environment'])}, 95 % intervals"
    )
    for column in ("credit", *COLUMNS.values(), "cost"):
        shown.add_column(column)
    for name, row in found["credits"].items():
        shown.add_row(escape(name), *(_cell(row.get(key)) for key in COLUMNS), f"{row['cost']:.1f}")
    results.print(shown)
    for sentence in found["sentences"]:
        results.print(sentence, markup=False, soft_wrap=True)
    for name, why in found["left_out"].items():
        results.print(f"left out {name}: {why}", markup=False, soft_wrap=True)


def _cell(estimate: Any) -> str:
    if not estimate:
        return "-"
    mean, low, high = ("?" if each is None else f"{each:.2f}" for each in estimate)
    return f"{mean}\n{low} {high}"
