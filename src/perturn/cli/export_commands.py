"""Commands that export a run: rows for other libraries, and policies for the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perturn.cli._base import command, existing, results
from perturn.display.progress_bars import at_work
from perturn.display.progress_bars import console as notices
from perturn.errors import check_belongs, check_known
from perturn.io.user_paths import user_path

TRAINED_BY_TRL = (
    "TRL's trainers put loss on all of a completion, what the environment said included; SFTConfig("
    "assistant_only_loss=True) leaves that out where TRL knows the chat template, and TurnTrainer always does."
)
"""Note that is printed with every export of rows, because no other message says this."""


@command(
    "export",
    "runs/demo-then --to trl",
    "runs/demo-then --to datasets --output data/demo",
    "runs/demo-then --to hub --repo me/demo-tlm-dre",
    panel="Look",
)
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", callback=existing, help="Folder of a run.")],
    to: Annotated[
        str,
        typer.Option(help="trl: JSONL rows; datasets: a DatasetDict; hub: a policy with its card."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="New folder to write; default: named after RUN and --to."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Policy to export for the Hub; default: the last trained.")
    ] = None,
    repo: Annotated[
        str | None, typer.Option(help="Upload the folder to this repository, such as me/my-policy.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
) -> None:
    """Export rows for TRL or datasets, or a policy for the Hub."""
    from perturn.run.export_run import FORMS, export_policy, export_rows, push

    check_known(to, FORMS, f"unknown --to {to!r}")
    of_hub = {"--policy": policy, "--repo": repo, "--private": private}
    check_belongs(of_hub, to == "hub", "--to hub", "add it, or leave them out")
    check_belongs({"--private": private}, repo, "--repo", "add it, or leave --private out")
    folder = Path(f"{run.resolve().name}-{to}") if output is None else user_path(output, "output")
    if to != "hub":
        with at_work("writing rows"):
            counts = export_rows(run, to, folder)
        held = ", ".join(f"{count} {name}" for name, count in counts.items())
        results.print(f"{folder}: {held}", markup=False, soft_wrap=True)
        notices.print(TRAINED_BY_TRL, style="dim", soft_wrap=True)
        return
    with at_work("writing the policy"):
        name = export_policy(run, folder, policy)
    results.print(f"{folder}: policy {name}, its card, recipe and scores", markup=False, soft_wrap=True)
    if repo:
        with at_work(f"uploading to {repo}"):
            where = push(folder, repo, private)
        results.print(where, markup=False, soft_wrap=True)
