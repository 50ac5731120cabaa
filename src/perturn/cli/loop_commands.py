"""Commands of the loop and of its stages, such as run, collect, pair, train and report."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import psutil
import typer

from perturn.cli._base import (
    AsJson,
    DryRun,
    GpuMemory,
    Overrides,
    Source,
    command,
    existing,
    results,
    say_json,
)
from perturn.cli._scores import print_summary
from perturn.display.progress_bars import at_work
from perturn.errors import check_belongs, required
from perturn.io.user_paths import user_path

if TYPE_CHECKING:
    from perturn.config.recipe import Recipe

STAGES = {
    "collect": (
        "Collect episodes of the expert and of the policy.",
        "recipes/scienceworld_tlm-dre_demo.yaml",
        "runs/demo-scienceworld --dry-run",
    ),
    "pair": (
        "Make the training rows of the alignment.",
        "runs/demo-then",
        "runs/demo-then --dry-run --json",
    ),
    "train": (
        "Train by SFT on expert episodes, then by alignment.",
        "runs/demo-scienceworld",
        "runs/demo-scienceworld --dry-run",
    ),
}
"""Commands that run a part of the loop, each with its help and examples."""


@command(
    "run",
    "demo",
    "demo seed=1 name=demo-1",
    "recipes/scienceworld_tlm-dre_demo.yaml --dry-run",
    "runs/demo",
    panel="The loop",
)
def run(
    source: Source,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    gpu_memory: GpuMemory = None,
    as_json: AsJson = False,
) -> None:
    """Run the whole loop of a recipe; call it again to resume."""
    from perturn.data.run_folder import resolve_recipe
    from perturn.free_memory import set_heap_aside
    from perturn.report import write_report
    from perturn.run.execute import open_run, run_stages
    from perturn.run.follow_up import in_order

    unread = {"--gpu-memory": gpu_memory}
    check_belongs(unread, dry_run, "--dry-run", "leave it out, since a run takes the GPUs that are there")
    if dry_run:
        show_plan(source, overrides, None, as_json, gpu_memory)
        return
    for index, recipe in enumerate(in_order(resolve_recipe(source, overrides or []))):
        if index and not as_json:
            results.print(
                f"then: {recipe.name} starts from {recipe.model.name}, which its scores call base",
                markup=False,
                soft_wrap=True,
            )
        with open_run(recipe) as opened:
            set_heap_aside()
            run_stages(opened)
            with at_work("writing the report"):
                report_file = write_report(opened.folder)
        summary = json.loads(opened.paths.summary.read_text(encoding="utf-8"))
        if as_json:
            say_json(summary)
            continue
        print_summary(summary)
        results.print(f"report:  {report_file}", soft_wrap=True)
        results.print(f"summary: {opened.paths.summary}", soft_wrap=True)


def _stage_command(name: str, says: str, *examples: str) -> None:
    """Register a command that runs the stages of one kind."""

    def stage(
        source: Source, overrides: Overrides = None, dry_run: DryRun = False, as_json: AsJson = False
    ) -> None:
        do_stages(name, source, overrides, dry_run, as_json)

    stage.__doc__ = says
    command(name, *examples, panel="The loop")(stage)


def do_stages(name: str, source: Path, overrides: list[str] | None, dry_run: bool, as_json: bool) -> None:
    """Run the stages of one command, or print the plan of a dry run."""
    from perturn.config.stages import stages
    from perturn.run.execute import open_run, run_stages

    if dry_run:
        show_plan(source, overrides, name, as_json)
        return
    with open_run(source, overrides or [], name) as opened:
        run_stages(opened, name)
    if as_json:
        names = [stage.name for stage in stages(opened.recipe) if stage.command == name]
        done = {each: opened.manifest["stages"].get(each) for each in names}
        say_json({"run": str(opened.folder), "stages": done})


for _name, _says in STAGES.items():
    _stage_command(_name, *_says)


def _began() -> float:
    """Return the start time of this command. A process older than a minute, such as a notebook, has done other work."""
    return max(psutil.Process().create_time(), time.time() - 60)


def show_plan(
    source: Path | Recipe,
    overrides: list[str] | None,
    name: str | None,
    as_json: bool,
    gpu_memory: float | None = None,
) -> None:
    """Print the plan of a recipe. Exit with code 1 if the recipe cannot run on this machine."""
    from perturn.data.run_folder import resolve_recipe
    from perturn.estimate.dry_run import Plan, make_plan, print_plan
    from perturn.run.follow_up import planned

    recipe = resolve_recipe(source, overrides or [])
    plans: list[Plan] = []
    for each in planned(recipe) if name is None else [recipe]:
        with at_work("estimating"):
            plans.append(make_plan(each, [], name, None if plans else _began(), gpu_memory))
    for plan in plans:
        if as_json:
            say_json(plan.to_dict())
        else:
            print_plan(plan, results)
    if any(plan.problems for plan in plans):
        raise typer.Exit(1)


_IGNORED = {
    "left_out": "left out (on no task of the run)",
    "no_success": "without success (ignored by training)",
    "cut": "cut (ended early)",
}
"""Counts of `import_expert` that are printed if they are not 0, each with its explanation."""


@command(
    "import-expert",
    "mine.jsonl recipes/alfworld_tlm-dre.yaml",
    "fireact.json recipes/hotpotqa_tlm-dre.yaml",
    panel="The loop",
)
def import_expert(
    file: Annotated[
        Path,
        typer.Argument(
            callback=existing,
            help="JSON lines of trajectories or of TRL's messages, or a format of the environment, such as FireAct's.",
        ),
    ],
    source: Source,
    overrides: Overrides = None,
) -> None:
    """Use recorded episodes as the expert episodes of a run."""
    from perturn.formats.row_sources import open_source
    from perturn.run.execute import open_run
    from perturn.run.stages.collect_stage import import_expert as bring

    open_source(file)  # a wrong path makes no run folder
    with open_run(source, overrides or [], "collect") as run, at_work("importing episodes"):
        counts = bring(run, file)
    said = [f"{counts['imported']} imported", f"{counts['before']} there before"]
    said += [f"{counts[name]} {what}" for name, what in _IGNORED.items() if counts[name]]
    results.print(f"{run.paths.trajectories('expert')}: {', '.join(said)}", soft_wrap=True)


@command(
    "report",
    "runs/demo",
    "runs/seed-0 runs/seed-1 --output both.html",
    "studies/results/lab",
    panel="The loop",
)
def report(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN [RUN ...] [KEY=VALUE ...]",
            help="Folders or recipes of runs, or the folder of one study.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="HTML file to write; default: the report in the run folder."),
    ] = None,
) -> None:
    """Write the report of runs or of a study: one HTML page."""
    from perturn.data.run_folder import refuse_other, resolve_recipe, run_folder
    from perturn.report import write_report
    from perturn.run.protocol_rules import ruled
    from perturn.run.recorded_inputs import refuse_changed, tell_changed
    from perturn.study.tables.study_page import write_study_page

    overrides = [word for word in sources if "=" in word and not os.path.exists(word)]
    paths = [user_path(word, "path") for word in sources if word not in overrides]
    required(paths or None, "RUN", "report shows one", "name a run folder or a recipe before the settings")
    if studies := [path for path in paths if (path / "study.yaml").is_file()]:
        of_runs = {"KEY=VALUE": overrides, "--output": output, "a second path": paths[1:]}
        remedy = f"give {studies[0]} alone, which is a study and has its page in its folder"
        check_belongs(of_runs, False, "a report of runs", remedy)
        results.print(str(write_study_page(paths[0])), soft_wrap=True)
        return
    folders = []
    for path in paths:
        if path.is_dir() and not overrides:  # its recipe may be of another version
            tell_changed(path)
            folders.append(path)
            continue
        recipe = ruled(resolve_recipe(path, overrides))
        refuse_other(recipe)
        refuse_changed(recipe, "report")
        folders.append(run_folder(recipe))
    with at_work("writing the report"):
        page = write_report(*folders, output=output)
    results.print(str(page), soft_wrap=True)
