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
from perturn.study.cells import Cell, Plan
from perturn.table import locate


def check_study(plan: Plan, cells: Iterable[Cell]) -> None:
    """Check the recipe of each cell as `perturn run` would, and that nothing is learned or tuned on the test panel.

    Of cells that differ in nothing but seed and swept settings, the world and the model of one are opened.

    Args:
        plan: Of the study.
        cells: Those to work on.

    Raises:
        PerturnError: The first mistake; it names the cell.
    """
    methods, panels = set(), set()
    for cell in cells:
        try:
            refuse_early(cell.recipe, None)
            if (cell.environment, cell.method) not in methods and not RunPaths(cell.folder).is_run:
                check(cell.recipe)
            elif cell.recipe.sft or cell.recipe.align:
                locate("perturn.run.trainable:check_training")(cell.recipe)
            methods.add((cell.environment, cell.method))
            if (key := _panels(cell.recipe)) not in panels:
                _refuse_overlap(plan, cell)
                panels.add(key)
        except PerturnError as error:
            raise type(error)(f"{cell.label}: {error}") from error


def _panels(recipe: Recipe) -> str:
    """All that decides which tasks the stages of a recipe see."""
    parts = (recipe.environment, recipe.sft and recipe.sft.tasks, recipe.explore and recipe.explore.tasks)
    evaluate = recipe.evaluate and recipe.evaluate.tasks
    plain = [
        each if each is None or isinstance(each, dict) else dataclasses.asdict(each)
        for each in (*parts, evaluate)
    ]
    return json.dumps(plain, sort_keys=True, default=str)


def _refuse_overlap(plan: Plan, cell: Cell) -> None:
    """Refuse a test panel of which a stage of the cell's run would see a task.

    Raises:
        ConfigError: Naming the section and a task.
    """
    test = plan.study.test.tasks
    with closing_world(world_maker(cell.recipe)()) as env:
        try:
            held = {task.id for task in choose_tasks(env, test)}
        except ConfigError as error:
            raise ConfigError(f"test.tasks: {error}") from error
        panels = look_up(cell.recipe, env)
    for name, tasks in panels.tasks.items():
        both = sorted(held.intersection(task.id for task in tasks))
        if both:
            section = "tune.tasks" if name == "evaluate" else f"{name}.tasks"
            raise ConfigError(
                f"test.tasks shares {len(both)} tasks with {section}, such as {both[0]!r:.80}; what is tested must not "
                "be learned or tuned on, so take another split, or `skip` those."
            )
