"""The whole loop: collect, train, explore, pair, align, evaluate, report. Each step is done once."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from perturn.data.run_folder import Run, is_run, refuse_other, resolve_recipe, run_folder
from perturn.data.seals import Seals, refuse_damage
from perturn.episodes.episode import misfit
from perturn.errors import ConfigError, RunError
from perturn.memory import release_memory
from perturn.report import write_report
from perturn.run.collect import collect_expert, collect_explore
from perturn.run.evaluate import evaluate
from perturn.run.pair import make_pairs
from perturn.run.progress import console
from perturn.run.session import (
    choose_tasks,
    engine_settings,
    make_protocol,
    make_renderer,
    sft_tasks,
    world_maker,
)
from perturn.run.trackers import check_trackers
from perturn.run.train import train_align, train_sft
from perturn.settings.recipe import Recipe, to_yaml
from perturn.table import locate
from perturn.types import Environment, EpisodeProtocol, Task


def open_run(source: Path, overrides: Sequence[str] = (), command: str | None = None) -> Run:
    """Open the run of a recipe or of a run folder; a new one is checked before its folder is made.

    Args:
        source: The recipe or the folder.
        overrides: `key=value` words.
        command: The one command the run is opened for; None: the whole loop.

    Raises:
        PerturnError: The first mistake that can be found without working.
    """
    recipe = resolve_recipe(source, overrides)
    refuse_other(recipe)
    check_trackers(recipe.report_to)
    refuse_training(recipe, command)
    if not is_run(run_folder(recipe)):
        check(recipe, command)
    run = Run(recipe)
    try:
        refuse_damage(run.folder, run.manifest["files"])
        _refuse_orphans(run)
    except BaseException:
        run.close()
        raise
    return run


def _refuse_orphans(run: Run) -> None:
    """Refuse a run of which a stage was removed, but not what was made from it."""
    for step in loop(run.recipe):
        if step.needs and run.is_done(step.name) and not run.is_done(step.needs):
            if step.needs not in run.manifest["stages"]:  # brought from another run, as a benchmark does
                continue
            remedy = " ".join(made_from(run.folder, run.recipe, run.manifest["files"], step.needs))
            raise RunError(
                f"{run.folder}: {step.needs} is to be done again, but {step.name} was made from what it was; "
                f"restore it from a copy, or have that made again too: rm -r {remedy}"
            )


def made_from(folder: Path, recipe: Recipe, seals: Seals, stage: str) -> list[str]:
    """Files and folders of a stage and of all that follows from it: what to remove to have them made again."""
    stages = {stage}
    for step in loop(recipe):
        if step.needs in stages or (stage == "expert" and step.name == "pair"):
            stages.add(step.name)
    files = [Path(file) for file, one in seals.items() if one["stage"] in stages]
    places = [Path(*file.parts[:2]) if file.parts[0] == "checkpoints" else file for file in files]
    return list(dict.fromkeys(shlex.quote(str(folder / place)) for place in places))


def check(recipe: Recipe, command: str | None = None) -> None:
    """Build everything the steps will need, so that a mistake shows now and not hours later.

    Args:
        recipe: Of the run.
        command: The one command it is for; None: the whole loop.

    Raises:
        PerturnError: The first mistake that can be found without working.
    """
    protocol = make_protocol(recipe.protocol)
    engine = engine_settings(recipe)
    if recipe.sft is not None or recipe.align is not None:
        locate("perturn.run.trainable:check_training")(recipe)
    engine.check(partial(_empty_model, recipe), to_yaml(recipe))
    if engine.serves_checkpoints:
        make_renderer(recipe, recipe.model.name)
        locate("perturn.run.trainable:check_model")(recipe, trains=command in (None, "train"))
    env = world_maker(recipe)()
    try:
        panels = {"sft": sft_tasks(recipe), "explore": recipe.explore.tasks}
        for name, panel in (panels | {"evaluate": recipe.evaluate.tasks}).items():
            try:
                tasks = choose_tasks(env, panel)
            except ConfigError as error:
                raise ConfigError(f"{name}.tasks: {error}") from error
        _check_format(env, tasks[0], protocol)
    finally:
        env.close()


def _empty_model(recipe: Recipe) -> Any:
    return locate("perturn.policy.models:empty_model")(recipe.model.name)


def _check_format(env: Environment, task: Task, protocol: EpisodeProtocol) -> None:
    """Refuse a format whose actions the world cannot take; a world that cannot pose the task is heard of later."""
    try:
        problem = misfit(env.reset(task, 0), protocol)
    except Exception:  # noqa: BLE001  environments are code of others; a bad episode is data
        return
    if problem:
        raise ConfigError(f"{env.name} {problem}")


def refuse_training(recipe: Recipe, command: str | None) -> None:
    """Refuse to train what the engine serves, if it is not ours to train.

    Raises:
        ConfigError: If the command, or the whole loop of the recipe, trains.
    """
    trains = command == "train" or (command is None and (recipe.sft or recipe.align))
    can_serve = engine_settings(recipe).serves_checkpoints
    for part in ("sft", "align"):
        if can_serve and getattr(recipe, part) is None:
            raise ConfigError(f"{part} is missing and has no default; set it in the recipe.")
    if trains and not can_serve:
        raise ConfigError(
            f"engine {recipe.engine['name']!r} serves a model that cannot be trained here; take engine.name=local, "
            "or do without training: perturn collect, pair, evaluate or report."
        )
    history = make_protocol(recipe.protocol).history
    if trains and history is not None:
        raise ConfigError(
            f"protocol {recipe.protocol.name!r} shows the last {history} turns alone, so its episodes are not one "
            "sequence each and cannot be trained on; set protocol.history=full to train, and evaluate under it with "
            "perturn evaluate."
        )


@dataclass(frozen=True)
class Step:
    """One step of the loop."""

    name: str
    command: str
    """The command that does it."""
    needs: str | None
    """The step whose result it starts from."""
    work: Callable[[Run], None]


def loop(recipe: Recipe) -> list[Step]:
    """The steps of a run, in order."""
    if not engine_settings(recipe).serves_checkpoints:
        return [
            Step("expert", "collect", None, collect_expert),
            Step("evaluate-base", "evaluate", None, partial(evaluate, policy="base")),
            Step("explore", "collect", None, partial(collect_explore, policy="base")),
            Step("pair", "pair", "explore", make_pairs),
        ]
    assert recipe.align is not None
    aligned = str(recipe.align.loss["name"])
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
    steps = [step for step in loop(run.recipe) if command in (None, step.command)]
    run.steps = [step.name for step in steps]
    for step in steps:
        if run.is_done(step.name) and not _plays_again(run, step):
            console.print(f"{step.name}: done before", style="dim")
        elif command and step.needs and not run.is_done(step.needs):
            console.print(f"{step.name}: waits for {step.needs}")
        else:
            console.print(step.name, style="bold")
            step.work(run)
            release_memory()


def _plays_again(run: Run, step: Step) -> bool:
    """Whether a stage is done but for episodes of the expert that failed, and nothing was made from it yet."""
    if step.name != "expert" or not run.manifest["stages"]["expert"]["counts"].get("failed"):
        return False
    return not any(run.is_done(stage) for stage in ("sft", "pair"))


def run_all(run: Run) -> Path:
    """Do the whole loop and write the report; where nothing is trained, the evaluation is the loop."""
    run_steps(run, None if run.recipe.sft else "evaluate")
    return write_report(run.folder)
