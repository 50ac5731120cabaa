"""Before work: whether a credit will find all that it needs of the world and its tasks."""

from __future__ import annotations

from perturn.policy.credits import named_credit
from perturn.run.answers import check_answers
from perturn.run.matches import check_gold_calls
from perturn.run.panels import Panels
from perturn.settings.recipe import Recipe
from perturn.types import Environment


def check_needed(recipe: Recipe, env: Environment, panels: Panels) -> None:
    """Refuse a recipe whose credit of groups reads what the world, or a task to be explored, does not have.

    Raises:
        PerturnError: Saying what is missing.
    """
    if recipe.align is None:
        return
    name, credit = named_credit(recipe.align.loss, recipe.credit)
    tasks = panels.tasks.get("explore", [])
    if "matches" in credit.needs:
        check_gold_calls(env, tasks, name)
    if "answer" in credit.needs:
        check_answers(recipe, tasks)
