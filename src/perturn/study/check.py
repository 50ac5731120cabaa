"""Mistakes of a study that can be found before any work."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

from perturn.data.paths import RunPaths
from perturn.errors import ConfigError, PerturnError
from perturn.faults import closing_world
from perturn.run.loop import check, refuse_early
from perturn.run.panels import choose_tasks, look_up
from perturn.run.session import world_maker
from perturn.settings.recipe import Recipe
from perturn.settings.sections import Tasks
from perturn.study.cells import Cell
from perturn.study.settings import Study
from perturn.table import locate
from perturn.types import Environment


def check_study(study: Study, cells: Iterable[Cell]) -> None:
    """Check the recipe of each cell as `perturn run` would, and that nothing is learned or tuned on the test panel.

    Of cells that differ in nothing but seed and swept settings, the world and the model of one are opened.

    Args:
        study: The study.
        cells: Those to work on.

    Raises:
        PerturnError: The first mistake; it names the cell.
    """
    methods, panels = set(), set()
    for cell in cells:
        try:
            refuse_early(cell.recipe, None)
            if (key := _panels(cell.recipe)) not in panels:
                _refuse_overlap(study, cell)
                panels.add(key)
            if (cell.environment, cell.method) not in methods and not RunPaths(cell.folder).is_run:
                check(cell.recipe)
            elif cell.recipe.sft or cell.recipe.align:
                locate("perturn.run.trainable:check_training")(cell.recipe)
            methods.add((cell.environment, cell.method))
        except PerturnError as error:
            raise type(error)(f"{cell.label}: {error}") from error


def _panels(recipe: Recipe) -> str:
    """All that decides which tasks the stages of a recipe see."""
    sections = (recipe.base, recipe.sft, recipe.explore, recipe.evaluate)
    tasks = [each and each.tasks and dataclasses.asdict(each.tasks) for each in sections]
    return json.dumps([recipe.environment, *tasks], sort_keys=True, default=str)


def _refuse_overlap(study: Study, cell: Cell) -> None:
    """Refuse a test panel of which a stage of the cell's run would see a task.

    Raises:
        ConfigError: Naming the section and a task.
    """
    with closing_world(world_maker(cell.recipe)()) as env:
        held = _ids(env, study.test.tasks, "test.tasks")
        if study.tune is not None:
            _ids(env, study.tune.tasks, "tune.tasks")
        panels = look_up(cell.recipe, env)
    for name, tasks in panels.tasks.items():
        both = sorted(held.intersection(task.id for task in tasks))
        if both:
            section = "tune.tasks" if name == "evaluate" else f"{name}.tasks"
            raise ConfigError(
                f"test.tasks shares {len(both)} tasks with {section}, such as {both[0]!r:.80}; what is tested must not "
                "be learned or tuned on, so take another split, or `skip` those."
            )


def _ids(env: Environment, panel: Tasks, where: str) -> set[str]:
    """Ids of the tasks of a panel."""
    try:
        return {task.id for task in choose_tasks(env, panel)}
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
