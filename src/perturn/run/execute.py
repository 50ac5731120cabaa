"""Open a run, check its recipe, and run each of its stages once."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from perturn.chat.model_names import refuse_misspelt
from perturn.chat.tokens import Renderer
from perturn.config.parsing import to_yaml
from perturn.config.recipe import Recipe
from perturn.config.stages import Stage, makes, own_files, stages
from perturn.data.file_seals import Seals, done_stages, read_manifest, refuse_damage
from perturn.data.run_folder import Run, refuse_other, resolve_recipe, run_folder
from perturn.data.run_paths import RunPaths, checkpoint_of
from perturn.display.live_iterations import Iterations, doing, shows_iterations
from perturn.display.progress_bars import at_work, console
from perturn.envs.world_process import plays_itself
from perturn.episodes.episode import misfit
from perturn.errors import ConfigError, DataError, RunError, check_known, check_none, required, within
from perturn.faults import closing_world
from perturn.formats.read_rows import Row, is_numbered, open_rows, rows_of, sides_of
from perturn.free_memory import release_memory
from perturn.io.read_input import user_path
from perturn.run.ahead import look_ahead
from perturn.run.checkpoint_retention import delete_unneeded, first_missing
from perturn.run.follow_up import in_order, planned
from perturn.run.judging.judged_rewards import ENGINE
from perturn.run.judging.side_engines import check_side_engine
from perturn.run.protocol_rules import make_protocol, ruled
from perturn.run.recorded_episodes import check_sampled, warn_of_other_template
from perturn.run.recorded_inputs import note_inputs, refuse_changed
from perturn.run.served_policy import engine_settings, require_weights
from perturn.run.session import Session, backend_settings, make_renderer, world_maker
from perturn.run.stages.branch_stage import check_explorer
from perturn.run.stages.collect_stage import check_expert
from perturn.run.stages.measure_distance import check_corrector, check_pathfinder
from perturn.run.stages.pretraining_stage import check_teacher
from perturn.run.stages.row_stage import ROWS_OF, check_experts, check_made
from perturn.run.stages.selector_checks import check_selection, refuse_seen
from perturn.run.task_lists import TaskLists, look_up_checked
from perturn.table import locate, require_library
from perturn.train_processes import from_leader, leader_first, leads, world_size
from perturn.types import (
    Environment,
    EpisodeProtocol,
    PreferencePair,
    Task,
    Trajectory,
    failed,
    succeeded,
)

TRACKERS = ("tensorboard", "trackio", "wandb")
"""Trackers that can receive the training metrics, besides the run folder."""


def open_run(source: Path | Recipe, overrides: Sequence[str] = (), command: str | None = None) -> Run:
    """Open the run of a recipe or of a run folder. A new run is checked before its folder is created.

    Args:
        source: The recipe, its file, or the folder.
        overrides: Overrides, as `key=value`.
        command: The single command, such as `train`, for which the run is opened. None: all stages.
    """
    with leader_first(), at_work("opening the run"):
        return _open(ruled(resolve_recipe(source, overrides)), command)


def _open(recipe: Recipe, command: str | None) -> Run:
    refuse_early(recipe, command)
    if command in (None, "train"):
        _refuse_offload(recipe)
    task_lists = None if RunPaths(run_folder(recipe)).is_run else check(recipe, command)
    run = Run(recipe)
    try:
        if task_lists is not None:
            task_lists.write(run.paths.tasks)
        refuse_damage(run.folder, run.manifest["files"])
        _refuse_orphans(run)
        if leads():
            note_inputs(run)
    except BaseException:
        run.close()
        raise
    return run


def refuse_early(recipe: Recipe, command: str | None, *, trains_here: bool = True) -> None:
    """Check all that needs no model: the run folder, changed inputs, trackers, and stages of the command.

    Args:
        recipe: Recipe of the run.
        command: The single command, such as `train`. None: all stages.
        trains_here: Whether this machine would do the training.
    """
    refuse_other(recipe)
    for follows in islice(in_order(recipe), 1, None) if command is None else ():
        begun = RunPaths(run_folder(follows)).is_run
        refuse_other(ruled(follows) if begun else follows)
    refuse_changed(recipe, command)
    check_trackers(recipe.report_to)
    if command is not None:
        sections = {
            "collect": "explore",
            "pair": "rows that are pairs",
            "credit": "rows.name=groups",
            "train": "base, sft or align",
            "evaluate": "evaluate",
        }
        found = next((stage for stage in stages(recipe) if stage.command == command), None)
        reader, remedy = "the recipe does not ask for one", f"add {sections[command]}"
        required(found, f"a stage of `{command}`", reader, remedy)
    if not (recipe.base or recipe.sft or recipe.align) or command not in (None, "train"):
        return
    without = "do without training: perturn collect, pair, evaluate or report"
    require_weights(recipe, "training changes the weights of the policy", without)
    if trains_here:
        for each in planned(recipe) if command is None else [recipe]:
            if "models" in backend_settings(each).traits.provides:
                check_none(_gpu_faults(each))


def _gpu_faults(recipe: Recipe) -> Iterator[str]:
    """Yield a message if an unfinished training stage does not have one GPU for each process."""
    waits = _waiting_trainings(recipe)
    gpus = locate("torch.cuda:device_count")() if waits and world_size() == 1 else 0
    processes = recipe.launch.processes
    if gpus > 1 and processes == 1:
        yield (
            f"this process sees {gpus} GPUs, and {waits[0]} trains on one in each process; set launch.processes={gpus} "
            "to train on all of them (with launch.sharding=fsdp2 if one GPU is too small), or CUDA_VISIBLE_DEVICES=0 "
            "to train on one. For vLLM on the other GPUs, start servers there, and name them in engine.servers."
        )
    if 0 < gpus < processes:
        yield f"launch.processes must be <= the {gpus} GPUs of this machine, got {processes}."


def _refuse_offload(recipe: Recipe) -> None:
    """Reject `cpu_offload` on a machine without a GPU. A dry run skips this check."""
    if recipe.launch.cpu_offload and _waiting_trainings(recipe) and not locate("torch.cuda:is_available")():
        raise ConfigError("launch.cpu_offload needs a GPU, and this machine has none; leave it out.")


def _waiting_trainings(recipe: Recipe) -> list[str]:
    """Return the names of the training stages that are not done."""
    done = done_stages(read_manifest(run_folder(recipe)))
    return [stage.name for stage in stages(recipe) if stage.command == "train" and stage.name not in done]


def check_trackers(names: Iterable[str]) -> None:
    """Reject a tracker that is unknown or not installed."""
    for name in names:
        check_known(name, TRACKERS, f"unknown report_to {name!r}")
        require_library(name, f"report_to={name}", name)


def _refuse_orphans(run: Run) -> None:
    """Reject a run in which a stage was removed although later stages were made from its results."""
    for stage in stages(run.recipe):
        for need in stage.needs if run.is_done(stage.name) else ():
            if not run.is_done(need) and need in run.manifest["stages"]:
                remedy = " ".join(made_from(run.folder, run.recipe, run.manifest["files"], need))
                made_again = f"or have that made again too: rm -r {remedy}"
                if missing := first_missing(run.paths, run.recipe, need):
                    made_again = (
                        f"it cannot be made again with what follows from it, since {missing} was not kept."
                    )
                raise RunError(
                    f"{run.folder}: {need} is to be done again, but {stage.name} was made from what it was; "
                    f"restore it from a copy; {made_again}"
                )


def made_from(folder: Path, recipe: Recipe, seals: Seals, name: str) -> list[str]:
    """Return the files and folders to remove, so that a stage and all stages that depend on it run again."""
    names = {name}
    for stage in stages(recipe):
        if names.intersection(stage.needs):
            names.add(stage.name)
    files = [file for file, one in seals.items() if one["stage"] in names]
    roots = [checkpoint_of(file) or file for file in files if os.path.lexists(folder / file)]
    return list(dict.fromkeys(shlex.quote(str(folder / root)) for root in roots))


def check(recipe: Recipe, command: str | None = None) -> TaskLists | None:
    """Check everything that the stages will need, so that mistakes are found before any work.

    Args:
        recipe: Recipe of the run.
        command: The single command, such as `train`, for which to check. None: all stages.

    Returns:
        The run's task lists; None without an environment.

    Raises:
        PerturnError: If a check fails; describes the first mistake.
    """
    for follows in planned(recipe)[1:2] if command is None else ():
        with within("then: "):
            check(follows)
    engine = engine_settings(recipe)
    if engine.traits.serves_checkpoints and recipe.base is None:
        refuse_misspelt(recipe.model.name)  # before torch is imported
    if recipe.base is not None or recipe.sft is not None or recipe.align is not None:
        locate("perturn.run.stages.training_checks:check_training")(recipe)
        locate("perturn.run.stages.backend_checks:check_backend")(recipe)
    check_teacher(recipe)
    check_made(recipe)
    check_selection(recipe)
    if recipe.staleness:
        locate("perturn.run.stages.staleness_checks:check_staleness")(recipe)
    if recipe.environment is not None and plays_itself(recipe.environment):
        locate("perturn.run.stages.agent_checks:check_agent")(recipe)
    engine.check(lambda: locate("perturn.run.stages.model_checks:empty_base")(recipe), to_yaml(recipe))
    _check_side_engines(recipe)
    renderer = None
    if engine.traits.serves_checkpoints:
        renderer = make_renderer(recipe, recipe.model.name) if recipe.base is None else None
        locate("perturn.run.stages.model_checks:check_model")(recipe, command in (None, "train"), renderer)
    own = _check_sources(recipe, renderer)
    if recipe.environment is None:
        check_pathfinder(recipe, None)
        check_experts(recipe, own, (), command)
        return None
    protocol = make_protocol(recipe.protocol)
    with closing_world(world_maker(recipe)()) as env:
        if command is None:  # `perturn import-expert` opens a run to bring the episodes
            check_expert(recipe, env)
        check_pathfinder(recipe, env)
        check_corrector(recipe, env)
        task_lists = look_up_checked(recipe, env, command)
        task_lists.warn_of_seen(set().union(*own.values()))
        check_experts(recipe, own, task_lists.tasks.get("explore", ()), command)
        refuse_seen(recipe, task_lists)
        if makes(recipe, "groups"):  # imported only here, since it imports torch
            locate("perturn.run.stages.credit_checks:check_needed")(recipe, env, task_lists)
        if any(part.needs for part in (recipe.explore, recipe.rows) if part is not None):
            locate("perturn.run.stages.credit_checks:check_sections")(recipe, env, task_lists)
        if recipe.explore is not None:
            check_explorer(recipe, task_lists.tasks.get("explore", []))
        first = next((tasks[0] for tasks in task_lists.tasks.values()), None)
        if first is not None:  # the user's own rows may be the only data
            _check_beginning(env, first, protocol)
    return task_lists


def _check_beginning(env: Environment, task: Task, protocol: EpisodeProtocol) -> None:
    """Reject a protocol in which an environment's first observation cannot be answered."""
    try:
        problem = misfit(env.reset(task, 0), protocol)
    except Exception:  # noqa: BLE001  errors of the environment are reported when it is played
        return
    if problem:
        raise ConfigError(f"{env.name} {problem}")


def _check_side_engines(recipe: Recipe) -> None:
    """Check the engines of the judge and the simulated user, if the recipe has them."""
    if recipe.judge is not None:
        check_side_engine(recipe.judge.engine, recipe.judge.model, ENGINE, to_yaml(recipe))
    if recipe.user is not None:
        check_side_engine(recipe.user.engine, recipe.user.model, "user.engine", to_yaml(recipe))


def _check_sources(recipe: Recipe, renderer: Renderer | None) -> dict[str, set[str]]:
    """Read the user's own rows once, and reject rows that training would reject.

    Returns:
        Ids of the tasks of the rows, by the key of the file. Without a judge, only successes of the expert count.
    """
    found: dict[str, set[str]] = {}
    for key, file in own_files(recipe).items():
        kind = Trajectory if recipe.rows is None or key != "rows.path" else ROWS_OF[recipe.rows.traits.makes]
        with within(f"{key}: ", DataError):
            open_rows(file)
        if renderer is not None and _reads_sampled(recipe, key):
            warn_of_other_template(user_path(file, key), renderer)
        checked = partial(_check_row, renderer, recipe.model.max_length, key, _reads_sampled(recipe, key))
        with at_work(f"checking {key}") as work:
            tasks, every = found.setdefault(key, set()), key != "expert.file" or recipe.judge is not None
            for count, row in enumerate(rows_of(user_path(file, key), kind, checked), start=1):
                sides = [side for side in sides_of(row) if every or succeeded(side)]
                tasks |= {side.task.id for side in sides if not is_numbered(side)}
                work.note = f"{count} rows"
    return found


def _reads_sampled(recipe: Recipe, key: str) -> bool:
    """Return whether the alignment reads the log-probabilities with which the tokens of a file were sampled."""
    if recipe.align is None or key != "explore.path":
        return False
    loss = locate("perturn.training.credit_choice:make_loss")(recipe.align.loss, "align.loss")
    return bool(loss.traits.needs_behavior)


def _check_row(renderer: Renderer | None, max_length: int | None, key: str, sampled: bool, row: Row) -> None:
    """Reject a user's row that the chat template rejects, a pair of equal sides, or an explored row without outcome.

    Rows that are not trained on are not checked.
    """
    if key == "explore.path" and isinstance(row, Trajectory) and is_numbered(row):
        raise DataError(
            "the row is a conversation, and has no task and no reward. `perturn import-logs` makes episodes of rows "
            "with `messages`, `reward` and `task`."
        )
    if sampled and isinstance(row, Trajectory):
        check_sampled(row)
    if renderer is None:
        return
    sides = sides_of(row)
    for side in sides:
        is_taught = is_numbered(side) if key == "expert.file" else not side.environment or len(sides) == 2
        if not failed(side) and (is_taught or succeeded(side)):
            renderer.check(side)
    if isinstance(row, PreferencePair) and not any(map(failed, sides)):
        locate("perturn.policy.examples:check_pair")(row, renderer, max_length)


def run_stages(
    run: Run,
    command: str | None = None,
    names: Collection[str] | None = None,
    take_over: Callable[[Stage], bool] = lambda stage: False,
) -> None:
    """Run the stages that are not done yet.

    Args:
        run: The run.
        command: Run only the stages of this command whose needs are done. None: the stages of all commands.
        names: Names of the stages to run. None: all stages.
        take_over: Function that tries to copy a stage from another run, and returns whether it has.
    """
    planned, trained = [], None
    for stage in stages(run.recipe):
        if stage.command == "train" and leads() and run.is_done(stage.name):
            # A killed process may have left the folder of the training.
            shutil.rmtree(run.paths.partial(stage.policy), ignore_errors=True)
            trained = stage
        if command in (None, stage.command) and (names is None or stage.name in names):
            planned.append(stage)
    if trained is not None:  # a killed process may have left earlier policies
        delete_unneeded(run, trained)
    run.planned = [stage.name for stage in planned]
    iterations = Iterations(run, planned) if shows_iterations(run, planned) else None
    waiting = []
    with Session(run) as session, at_work(run.recipe.name):
        for stage in planned:
            waits, done = from_leader(
                (
                    [need for need in stage.needs if not run.is_done(need)],
                    run.is_done(stage.name) and not _plays_again(run, stage),
                )
            )
            if done:
                console.print(f"{stage.name}: done before", style="dim")
            elif command and waits:
                waiting.append((stage.name, waits[0]))
            elif not run.is_done(stage.name) and take_over(stage):
                console.print(f"{stage.name}: copied from another run", style="dim")
            else:
                with doing(stage, iterations):
                    if command is None:
                        look_ahead(session, stage, planned)
                    locate(stage.does)(session, stage)
                    release_memory()
    if waiting:
        _say_waiting(run, waiting)


def _say_waiting(run: Run, waiting: Sequence[tuple[str, str]]) -> None:
    """Print which stages still wait for other stages, and the command that runs them.

    Args:
        run: The run.
        waiting: Names of waiting stages, each with the name of a stage that must be done first.
    """
    (name, need), *others = waiting
    more = (
        f", and {len(others)} more {'stage waits' if len(others) == 1 else 'stages wait'}" if others else ""
    )
    console.print(
        f"left for later: {name} needs {need}{more}. `perturn run {shlex.quote(str(run.folder))}` does all stages.",
        markup=False,
        soft_wrap=True,
    )


def _plays_again(run: Run, stage: Stage) -> bool:
    """Return whether the expert's FAILED episodes are played again: no later stage is done or has unfinished files."""
    if stage.name != "expert" or not run.manifest["stages"]["expert"]["counts"].get("failed"):
        return False
    paths, later = run.paths, [each for each in stages(run.recipe) if "expert" in each.needs]
    begun = [file for each in later for file in (paths.partial(each.policy), paths.trajectories(each.name))]
    return not any(run.is_done(each.name) for each in later) and not any(file.exists() for file in begun)
