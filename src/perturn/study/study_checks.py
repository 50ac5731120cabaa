"""Check a study for mistakes before it does any work."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping

from perturn.config.recipe import Recipe
from perturn.config.sections import Tasks
from perturn.config.stages import own_files
from perturn.data.file_seals import read_manifest
from perturn.data.run_paths import RunPaths
from perturn.errors import ConfigError, PerturnError, RunError, within
from perturn.faults import closing_world
from perturn.formats.read_rows import read_rows, sides_of
from perturn.io.read_input import user_path
from perturn.run.execute import check, refuse_early
from perturn.run.policy_origin import Maker
from perturn.run.recorded_inputs import changes
from perturn.run.session import world_maker
from perturn.run.stages.selector_checks import check_selection
from perturn.run.task_lists import choose_tasks, look_up
from perturn.study.cells import Cell
from perturn.study.settings import Study
from perturn.study.tables.episode_table import check_parquet
from perturn.table import locate
from perturn.types import Environment


def check_study(study: Study, cells: Iterable[Cell], *, trains_here: bool = True) -> None:
    """Check the recipe of each cell as `perturn run` would, and check that no tuning or test task is trained on.

    The environment and the model are opened once for each method and model. Cells of a method also differ in their
    seeds, swept settings and other settings of `by_seed`; inputs that only these name are opened when the cell runs.

    Args:
        study: The study.
        cells: All cells that may have to be run.
        trains_here: Whether the cells run on this machine, and not on the nodes of a cluster.
    """
    check_parquet()
    methods, task_lists = set(), set()
    for cell in cells:
        try:
            scoring = cell.scoring_recipe(cell.recipe.model.name)
            opened = (cell.of, str(cell.recipe.model))  # `by_seed` may change the model
            is_first = opened not in methods
            check_selection(scoring, _maker(cell), warns=is_first)
            refuse_early(cell.recipe, None, trains_here=trains_here)
            if (key := _task_list_key(cell.recipe)) not in task_lists:
                _refuse_overlap(study, cell)
                task_lists.add(key)
            if is_first and not RunPaths(cell.folder).is_run:
                check(cell.recipe)
            elif cell.recipe.sft or cell.recipe.align:
                locate("perturn.run.stages.training_checks:check_training")(cell.recipe, warns=is_first)
            methods.add(opened)
        except PerturnError as error:
            raise type(error)(f"{cell.label}: {error}") from error


def refuse_changed_inputs(cells: Iterable[Cell]) -> None:
    """Raise an error if an input of a run that exists has changed, such as the code of a credit.

    A missing input is no error: `check_study` finds it if a cell still has to read it.
    """
    for cell in cells:
        for folder in (cell.folder, cell.scored):
            for change in changes(read_manifest(folder).get("inputs") or {}):
                if not change.gone:
                    raise RunError(
                        f"{cell.label}: {change}: restore the file, or give the study another name; name=NEW "
                        f"share=[OLD] reuses all stages that did not read it. If the cell failed, you can also delete "
                        f"{folder}, which is then made anew."
                    )


def _maker(cell: Cell) -> Maker | None:
    """Return the run of a cell that trains the scored policy; None if the cell scores an untrained model."""
    if cell.policy == "base" and cell.recipe.base is None:
        return None
    return Maker(cell.folder, cell.recipe, cell.policy)


def _task_list_key(recipe: Recipe) -> str:
    """Return a key of all settings that decide which tasks the stages of a recipe play."""
    sections = (recipe.base, recipe.sft, recipe.explore)
    tasks = [each and each.tasks and dataclasses.asdict(each.tasks) for each in sections]
    made = [each is not None for each in (*sections, recipe.expert, recipe.evaluate)]
    return json.dumps([recipe.environment, tasks, made, own_files(recipe)], sort_keys=True, default=str)


def _refuse_overlap(study: Study, cell: Cell) -> None:
    """Reject tuning or test tasks that a stage of the cell's run would train on."""
    with closing_world(world_maker(cell.recipe)()) as env:
        tested = _ids(env, study.test.tasks, "test.tasks")
        tuned = set() if study.tune is None else _ids(env, study.tune.tasks, "tune.tasks")
        task_lists = look_up(cell.recipe, env).tasks
    learned = {
        f"{name}.tasks": {task.id for task in tasks}
        for name, tasks in task_lists.items()
        if name != "evaluate"
    }
    learned |= {key: _ids_in(file, key) for key, file in own_files(cell.recipe).items()}
    _refuse_shared("test.tasks", tested, learned | {"tune.tasks": tuned})
    _refuse_shared("tune.tasks", tuned, learned)


def _refuse_shared(task_list: str, held: set[str], others: Mapping[str, set[str]]) -> None:
    """Reject a task list that shares a task with other task lists."""
    must_not = (
        "tested must not be learned or tuned on"
        if task_list == "test.tasks"
        else "tuned on must not be learned"
    )
    for name, ids in others.items():
        if both := sorted(held & ids):
            whose = "take its rows out" if name.endswith((".file", ".path")) else "`skip` those"
            raise ConfigError(
                f"{task_list} shares {len(both)} tasks with {name}, such as {both[0]!r:.80}; what is {must_not}, so "
                f"take another split, or {whose}."
            )


def _ids_in(file: str, key: str) -> set[str]:
    """Return the task ids in a file of the user's. The id of a row in TRL's format is its number."""
    return {side.task.id for row in read_rows(user_path(file, key)) for side in sides_of(row)}


def _ids(env: Environment, task_list: Tasks, where: str) -> set[str]:
    """Return the ids of the tasks in a task list."""
    with within(f"{where}: "):
        return {task.id for task in choose_tasks(env, task_list)}
