"""The loop, done: a run is opened and checked, and each of its stages is done once."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from perturn.data.run_folder import Run, is_run, refuse_other, resolve_recipe, run_folder
from perturn.data.seals import Seals, refuse_damage
from perturn.episodes.episode import misfit
from perturn.errors import ConfigError, RunError
from perturn.faults import closing_world
from perturn.io.reading import user_path
from perturn.memory import release_memory
from perturn.run.panels import Panels, look_up
from perturn.run.progress import console
from perturn.run.session import (
    Session,
    engine_settings,
    make_protocol,
    make_renderer,
    world_maker,
)
from perturn.run.trackers import check_trackers
from perturn.settings.recipe import Recipe, to_yaml
from perturn.settings.stages import Stage, stages
from perturn.table import locate
from perturn.types import Environment, EpisodeProtocol, Task


def open_run(source: Path | Recipe, overrides: Sequence[str] = (), command: str | None = None) -> Run:
    """Open the run of a recipe or of a run folder; a new one is checked before its folder is made.

    Args:
        source: The recipe, its file, or the folder.
        overrides: `key=value` words.
        command: The one command the run is opened for; None: the whole loop.

    Raises:
        PerturnError: The first mistake that can be found without working.
    """
    recipe = resolve_recipe(source, overrides)
    refuse_other(recipe)
    check_trackers(recipe.report_to)
    refuse_command(recipe, command)
    refuse_training(recipe, command)
    panels = None if is_run(run_folder(recipe)) else check(recipe, command)
    run = Run(recipe)
    try:
        if panels is not None:
            panels.write(run.tasks)
        refuse_damage(run.folder, run.manifest["files"])
        _refuse_orphans(run)
    except BaseException:
        run.close()
        raise
    return run


def refuse_command(recipe: Recipe, command: str | None) -> None:
    """Refuse a command for which a recipe has no stage.

    Raises:
        ConfigError: Naming the section that is missing.
    """
    if command is None or any(stage.command == command for stage in stages(recipe)):
        return
    sections = {"collect": "explore", "pair": "pair", "train": "sft or align", "evaluate": "evaluate"}
    raise ConfigError(f"the recipe has no stage of `{command}`; add the section {sections[command]}.")


def _refuse_orphans(run: Run) -> None:
    """Refuse a run of which a stage was removed, but not what was made from it."""
    for stage in stages(run.recipe):
        for need in stage.needs:
            if run.is_done(stage.name) and not run.is_done(need) and need in run.manifest["stages"]:
                remedy = " ".join(made_from(run.folder, run.recipe, run.manifest["files"], need))
                raise RunError(
                    f"{run.folder}: {need} is to be done again, but {stage.name} was made from what it was; "
                    f"restore it from a copy, or have that made again too: rm -r {remedy}"
                )


def made_from(folder: Path, recipe: Recipe, seals: Seals, name: str) -> list[str]:
    """Files and folders of a stage and of all that follows from it: what to remove to have them made again."""
    names = {name}
    for stage in stages(recipe):
        if names.intersection(stage.needs):
            names.add(stage.name)
    files = [Path(file) for file, one in seals.items() if one["stage"] in names]
    files = [file for file in files if os.path.lexists(folder / file)]
    roots = [Path(*file.parts[:2]) if file.parts[0] == "checkpoints" else file for file in files]
    return list(dict.fromkeys(shlex.quote(str(folder / root)) for root in roots))


def check(recipe: Recipe, command: str | None = None) -> Panels | None:
    """Build everything the stages will need, so that a mistake shows now and not hours later.

    Args:
        recipe: Of the run.
        command: The one command it is for; None: the whole loop.

    Returns:
        The tasks, where anything is played.

    Raises:
        PerturnError: The first mistake that can be found without working.
    """
    if recipe.iterations > 1 and recipe.align is not None:
        raise ConfigError(
            "iterations > 1 can be listed with --dry-run, and not be run yet; set iterations=1."
        )
    engine = engine_settings(recipe)
    if recipe.sft is not None or recipe.align is not None:
        locate("perturn.run.trainable:check_training")(recipe)
    engine.check(partial(_empty_model, recipe), to_yaml(recipe))
    if engine.serves_checkpoints:
        make_renderer(recipe, recipe.model.name)
        locate("perturn.run.trainable:check_model")(recipe, trains=command in (None, "train"))
    for section, file in (
        ("expert", recipe.expert and recipe.expert.file),
        ("pair", recipe.pair and recipe.pair.file),
    ):
        if file and not user_path(file, f"{section}.file").is_file():
            raise ConfigError(f"{section}.file: {file} does not exist; give a file of JSON lines.")
    if recipe.environment is None:
        return None
    protocol = make_protocol(recipe.protocol)
    with closing_world(world_maker(recipe)()) as env:
        panels = look_up(recipe, env)
        first = next((tasks[0] for tasks in panels.tasks.values()), None)
        if first is not None:  # pairs or episodes of the user's own may be all there is
            _check_format(env, first, protocol)
    return panels


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
    trains = (recipe.sft or recipe.align) and command in (None, "train")
    if trains and not engine_settings(recipe).serves_checkpoints:
        raise ConfigError(
            f"engine {recipe.engine['name']!r} serves a model that cannot be trained here; take engine.name=local, "
            "or do without training: perturn collect, pair, evaluate or report."
        )
    history = make_protocol(recipe.protocol).history if recipe.protocol else None
    if trains and history is not None:
        assert recipe.protocol is not None
        raise ConfigError(
            f"protocol {recipe.protocol.name!r} shows the last {history} turns alone, so its episodes are not one "
            "sequence each and cannot be trained on; set protocol.history=full to train, and evaluate under it with "
            "perturn evaluate."
        )


def run_stages(run: Run, command: str | None = None, names: Collection[str] | None = None) -> None:
    """Do the stages that are not done yet.

    Args:
        run: The run.
        command: Do the stages of one command only, those that can be done now; None: of all.
        names: Do these stages only; None: all.
    """
    for stage in stages(run.recipe):
        if stage.command == "train" and run.is_done(
            stage.name
        ):  # a kill may have left what it was trained in
            shutil.rmtree(run.checkpoint(f"{stage.policy}.partial"), ignore_errors=True)
    planned = [
        stage
        for stage in stages(run.recipe)
        if command in (None, stage.command) and (names is None or stage.name in names)
    ]
    run.planned = [stage.name for stage in planned]
    with Session(run) as session:
        for stage in planned:
            waits = [need for need in stage.needs if not run.is_done(need)]
            if run.is_done(stage.name) and not _plays_again(run, stage):
                console.print(f"{stage.name}: done before", style="dim")
            elif command and waits:
                console.print(f"{stage.name}: waits for {waits[0]}")
            else:
                console.print(stage.name, style="bold")
                locate(stage.does)(session, stage)
                release_memory()


def _plays_again(run: Run, stage: Stage) -> bool:
    """Whether a stage is done but for episodes of the expert that failed, and nothing was made from it yet."""
    if stage.name != "expert" or not run.manifest["stages"]["expert"]["counts"].get("failed"):
        return False
    return not any(run.is_done(later.name) for later in stages(run.recipe) if "expert" in later.needs)
