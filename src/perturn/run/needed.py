"""Before work: whether a credit will find all that it needs of the world and its tasks."""

from __future__ import annotations

from perturn.credit import Credit
from perturn.errors import ConfigError
from perturn.policy.credits import (
    named_credit,
    reads_reward_model,
    takes_unfinished,
    trains_branches,
    weighs_alone,
)
from perturn.policy.models import empty_model
from perturn.run.answers import answer_form, check_answers
from perturn.run.matches import check_gold_calls
from perturn.run.panels import Panels
from perturn.run.quantities import is_of_run, is_own_reference
from perturn.settings.compatibility import explorer_name, misfit
from perturn.settings.recipe import Recipe
from perturn.settings.stages import makes, policy_of, stages
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
    check_prover(recipe, name, credit)
    grouped = makes(recipe, "groups")
    provides = recipe.explore.traits.provides if grouped and recipe.explore else frozenset()
    if provides and not ("branches" in credit.needs or trains_branches(credit)):
        raise ConfigError(
            f"credit {name} does not read {', '.join(sorted(provides))}, which explore.name={explorer_name(recipe)} "
            "provides; take explore.name=rollouts, or a credit that does, such as credit.name=spo."
        )
    if grouped:
        _check_progress(recipe, name, credit)
        _check_samples(recipe, name, credit)
    if "matches" in credit.needs:
        check_gold_calls(env, tasks, name)
    if "answer" in credit.needs:
        check_answers(recipe, tasks)
    if "answers" in credit.needs:
        if getattr(credit, "reference", "own") == "gold":
            check_answers(recipe, tasks)
        answer_form(recipe)


def _check_samples(recipe: Recipe, name: str, credit: Credit) -> None:
    """Refuse groups of one where the credit compares the samples of a task.

    Raises:
        ConfigError: Saying what to set.
    """
    if recipe.explore is None or recipe.explore.samples > 1:
        return
    if not weighs_alone(credit):
        raise ConfigError(
            f"explore.samples must be > 1 with credit {name}, which compares the samples of a task, got 1; or take one "
            "that weighs each by itself, such as credit.name=turn-gae; one of your own says so by weighs_alone = True."
        )
    drops = recipe.rows is not None and recipe.rows.traits.drop_equal_outcomes
    if drops and not trains_branches(credit):
        raise ConfigError(
            "explore.samples must be > 1 with rows.drop_equal_outcomes, since no other outcome is there to be equal "
            "to, got 1; or leave it out."
        )


def _check_progress(recipe: Recipe, name: str, credit: Credit) -> None:
    """Refuse a reward model without its reader, or a reader without it, and a policy that is always its own reference.

    Raises:
        PerturnError: Saying what to set, or that the policy which the credit names cannot be read.
    """
    reads = reads_reward_model(credit)
    if reads and recipe.reward is None:
        raise ConfigError(
            f"credit {name} reads a reward model that learns in each iteration; add a section reward, such as "
            "reward: {}, or name a trained one in credit.checkpoint."
        )
    if recipe.reward is not None and not reads:
        raise ConfigError(
            f"credit {name} reads no reward model of the run; leave reward out, or take credit.name=oprl without "
            "checkpoint."
        )
    if "progress" not in credit.needs or reads:
        return
    references = {one.iteration: one.reference for one in stages(recipe) if one.command == "credit"}
    if is_own_reference(credit, recipe, references):
        raise ConfigError(
            f"credit {name} would compare each policy with itself; take align.reference=start or average and several "
            "iterations, or name another policy in credit.checkpoint."
        )
    named = getattr(credit, "checkpoint", None)
    if named in (None, "base", policy_of(recipe, 0)):
        return
    if is_of_run(recipe, named):
        raise ConfigError(
            f"credit.checkpoint: policy {named} is not there before the loop; name one that is, base or sft, a folder, "
            "or a Hub id."
        )
    empty_model(named)


def check_prover(recipe: Recipe, name: str, credit: Credit) -> None:
    """Reject branches that a credit cannot read, or that are not there.

    Args:
        recipe: Of the run, which may have branches.
        name: The credit's.
        credit: What may read them.

    Raises:
        ConfigError: Saying what to take.
    """
    if recipe.explore is None:
        return
    reads, trains = "branches" in credit.needs or trains_branches(credit), trains_branches(credit)
    takes = {
        "unfinished": takes_unfinished(credit) and not trains,
        "some-episodes": not reads,
        "prover": not reads or (not trains and getattr(credit, "takes_prover", False)),
        "cut-branches": not reads or takes_unfinished(credit),
        "dependent-branches": not (trains and getattr(credit, "unbiased", False)),
    }
    needs = ("branches",) if reads else ()
    problem = misfit(recipe, f"credit {name}", needs, {each for each, taken in takes.items() if taken})
    if problem:
        raise ConfigError(problem)
