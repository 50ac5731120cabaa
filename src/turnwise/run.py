"""The whole loop: collect, train, explore, pair, align, evaluate, report. Each step is done once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from turnwise.collect import collect_expert, collect_explore
from turnwise.evaluate import evaluate
from turnwise.pair import make_pairs
from turnwise.progress import console
from turnwise.report import write_report
from turnwise.train import train_align, train_sft
from turnwise.workspace import Run


@dataclass(frozen=True)
class Step:
    """One step of the loop."""

    name: str
    command: str
    """The command that does it."""
    needs: str | None
    """The step whose result it starts from."""
    work: Callable[[Run], None]


def loop(run: Run) -> list[Step]:
    """The steps of a run, in order."""
    aligned = str(run.recipe.align.loss["name"])
    return [
        Step("expert", "collect", None, collect_expert),
        Step("evaluate-base", "evaluate", None, partial(evaluate, policy="base")),
        Step("sft", "train", "expert", train_sft),
        Step("evaluate-sft", "evaluate", "sft", partial(evaluate, policy="sft")),
        Step("explore", "collect", "sft", collect_explore),
        Step("pair", "pair", "explore", make_pairs),
        Step("align", "train", "pair", train_align),
        Step(f"evaluate-{aligned}", "evaluate", "align", partial(evaluate, policy=aligned)),
    ]


def run_steps(run: Run, command: str | None = None) -> None:
    """Do the steps that are not done yet.

    Args:
        run: The run.
        command: Do the steps of one command only, those that can be done now; None: the whole loop.
    """
    for step in loop(run):
        if command not in (None, step.command):
            continue
        if run.is_done(step.name):
            console.print(f"{step.name}: done before", style="dim")
        elif command and step.needs and not run.is_done(step.needs):
            console.print(f"{step.name}: waits for {step.needs}")
        else:
            console.print(step.name, style="bold")
            step.work(run)


def run_all(run: Run) -> Path:
    """Do the whole loop and write the report."""
    run_steps(run)
    return write_report(run.folder)
