"""Check before any work that quantities which a credit, an explorer or a row maker needs can be computed."""

from __future__ import annotations

from collections.abc import Iterator

from perturn.config.compatibility import explorer_name, misfit
from perturn.config.recipe import Recipe
from perturn.config.stages import rows_name, stages
from perturn.credit import Credit
from perturn.errors import ConfigError, check_none
from perturn.quantities import Planned, check_needs, policies_of, wanted
from perturn.quantities.protocol import REWARD
from perturn.run.stages.answer_form import answer_form
from perturn.run.task_lists import TaskLists
from perturn.training.credit_choice import named_credit, weighs_alone
from perturn.types import Environment


def check_needed(recipe: Recipe, env: Environment, task_lists: TaskLists) -> None:
    """Reject a recipe whose credit reads quantities that the environment or a task does not have."""
    if recipe.align is None:
        return
    name, credit = named_credit(recipe.align.loss, recipe.credit)
    tasks = task_lists.tasks.get("explore", [])
    wanted(credit.needs, f"credit {name}")
    check_prover(recipe, name, credit)
    provides = recipe.explore.traits.provides if recipe.explore else frozenset()
    if provides and not reads_branches(credit):
        raise ConfigError(
            f"credit {name} does not read {', '.join(sorted(provides))}, which explore.name={explorer_name(recipe)} "
            "provides; take explore.name=rollouts, or a credit that does, such as credit.name=spo."
        )
    check_none(_reward_faults(recipe, name, credit))
    check_none(_sample_faults(recipe, name, credit))
    references = {one.iteration: one.reference for one in stages(recipe) if one.command == "credit"}
    planned = Planned(f"credit {name}", recipe, lambda: answer_form(recipe), references, env, tasks)
    check_needs(credit.needs, planned)


def check_sections(recipe: Recipe, env: Environment, task_lists: TaskLists) -> None:
    """Reject an explorer or a row maker that needs a quantity which cannot be computed."""
    tasks = task_lists.tasks.get("explore", [])
    for section, name_in, part in (
        ("explore", explorer_name, recipe.explore),
        ("rows", rows_name, recipe.rows),
    ):
        if part is not None:
            reader = f"{section}.name={name_in(recipe)}"
            check_needs(part.needs, Planned(reader, recipe, lambda: answer_form(recipe), {}, env, tasks))


def reads_branches(credit: Credit) -> bool:
    """Return whether a credit reads branches or trains on them."""
    needs = wanted(credit.needs).values()
    return credit.traits.trains_branches or any(quantity.traits.reads_branches for quantity, _ in needs)


def _sample_faults(recipe: Recipe, name: str, credit: Credit) -> Iterator[str]:
    """Yield a message if a credit compares the episodes of a task, and each task has only one episode."""
    if recipe.explore is None or recipe.explore.samples > 1 or recipe.explore.traits.source is not None:
        return
    if not weighs_alone(credit):
        yield (
            f"explore.samples must be > 1 with credit {name}, which compares samples of a task, got 1; or take "
            "a credit of single samples, such as credit.name=turn-gae; your own has the trait weighs_alone."
        )
    drops = recipe.rows is not None and recipe.rows.traits.drop_equal_outcomes
    if drops and not credit.traits.trains_branches:
        yield (
            "explore.samples must be > 1 with rows.drop_equal_outcomes, since no other outcome is there to be equal "
            "to, got 1; or leave it out."
        )


def _reward_faults(recipe: Recipe, name: str, credit: Credit) -> Iterator[str]:
    """Yield a message if the recipe has a reward model that the credit does not read."""
    if recipe.reward_model is not None and REWARD not in policies_of(credit.needs):
        yield (
            f"credit {name} reads no reward model of the run; leave reward.model out, or take credit.name=oprl without "
            "checkpoint."
        )


def check_prover(recipe: Recipe, name: str, credit: Credit) -> None:
    """Reject a recipe whose branches a credit cannot use, or which lacks branches that a credit needs.

    Args:
        recipe: Recipe of the run.
        name: Name of the credit.
        credit: The credit.
    """
    if recipe.explore is None:
        return
    reads, traits = reads_branches(credit), credit.traits
    takes = {
        "unfinished": traits.takes_unfinished and not traits.trains_branches,
        "some-episodes": not reads,
        "prover": not reads or (traits.takes_prover and not traits.trains_branches),
        "cut-branches": not reads or traits.takes_unfinished,
        "dependent-branches": not (traits.trains_branches and traits.unbiased),
    }
    needs = ("branches",) if reads else ()
    taken = {each for each, is_taken in takes.items() if is_taken}
    check_none([misfit(recipe, f"credit {name}", needs, taken)])
