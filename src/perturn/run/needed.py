"""Before work: whether a credit will find all that it needs of the world and its tasks."""

from __future__ import annotations

from collections.abc import Sequence

from perturn.credit import Credit
from perturn.errors import ConfigError
from perturn.policy.credits import named_credit, weighs_alone
from perturn.quantities import Planned, policies_of, wanted
from perturn.quantities.protocol import REWARD
from perturn.run.answers import answer_form
from perturn.run.panels import Panels
from perturn.run.session import make_protocol
from perturn.settings.recipe import Recipe
from perturn.settings.stages import stages
from perturn.types import Environment, Task


def check_needed(recipe: Recipe, env: Environment, panels: Panels) -> None:
    """Refuse a recipe whose credit of groups reads what the world, or a task to be explored, does not have.

    Raises:
        PerturnError: Saying what is missing.
    """
    if recipe.align is None:
        return
    name, credit = named_credit(recipe.align.loss, recipe.credit)
    tasks = panels.tasks.get("explore", [])
    needs = wanted(credit.needs, f"credit {name}")
    _check_window(recipe, name, credit, tasks)
    _check_branches(recipe, name, reads_branches(credit))
    if recipe.groups:
        check_prover(recipe, name, credit)
        _check_reward(recipe, name, credit)
        _check_samples(recipe, name, credit)
    references = {one.iteration: one.reference for one in stages(recipe) if one.command == "credit"}
    planned = Planned(f"credit {name}", recipe, lambda: answer_form(recipe), references, env, tasks)
    for quantity, request in needs.values():
        quantity.check(request, planned)


def reads_branches(credit: Credit) -> bool:
    """Whether a credit reads branches, or trains on them."""
    needs = wanted(credit.needs).values()
    return credit.traits.trains_branches or any(quantity.traits.reads_branches for quantity, _ in needs)


def _check_branches(recipe: Recipe, name: str, reads: bool) -> None:
    """Refuse a credit that reads branches where none are played, and branches that nothing reads.

    Raises:
        ConfigError: Saying what to set.
    """
    if reads and recipe.branch is None:
        raise ConfigError(
            f"credit {name} reads episodes that are played on from turns of explored ones; add a section branch, such "
            "as branch: {}."
        )
    if recipe.groups and recipe.branch and not reads:
        raise ConfigError(f"credit {name} reads no branches; leave branch out, or take credit.name=spo.")


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
            "that weighs each by itself, such as credit.name=turn-gae; one of your own has the trait weighs_alone."
        )
    if recipe.groups and recipe.groups.drop_equal_outcomes and not credit.traits.trains_branches:
        raise ConfigError(
            "explore.samples must be > 1 with groups.drop_equal_outcomes, since no other outcome is there to be equal "
            "to, got 1; or leave it out."
        )


def _check_window(recipe: Recipe, name: str, credit: Credit, tasks: Sequence[Task]) -> None:
    """Refuse windows that cut no episode, and those whose episodes the credit would take for over.

    Raises:
        ConfigError: Saying what to set.
    """
    window = recipe.explore.window if recipe.explore else None
    if window is None:
        return
    if not credit.traits.takes_unfinished or credit.traits.trains_branches:
        what = "branches of episodes" if credit.traits.trains_branches else "episodes by how they end"
        raise ConfigError(
            f"credit {name} weighs {what}, and with explore.window some are not over; take credit.name=turn-gae, or "
            "leave the window out."
        )
    longest = max(map(make_protocol(recipe.protocol).limit, tasks), default=0)
    if tasks and window >= longest:
        raise ConfigError(
            f"explore.window is {window}, and no episode has more than {longest} turns, so that none would be cut; "
            "take less, or leave it out."
        )


def _check_reward(recipe: Recipe, name: str, credit: Credit) -> None:
    """Refuse a reward model that nothing reads.

    Raises:
        ConfigError: Saying what to set.
    """
    if recipe.reward is not None and REWARD not in policies_of(credit.needs):
        raise ConfigError(
            f"credit {name} reads no reward model of the run; leave reward out, or take credit.name=oprl without "
            "checkpoint."
        )


def check_prover(recipe: Recipe, name: str, credit: Credit) -> None:
    """Refuse branches that a credit cannot read: of some episodes alone, searched for, or by another policy.

    Args:
        recipe: Of the run, which may have branches.
        name: The credit's.
        credit: What may read them.

    Raises:
        ConfigError: Saying what to take.
    """
    if recipe.branch is None or not reads_branches(credit):
        return
    if recipe.branch.of != "all":
        raise ConfigError(
            f"branch.of is {recipe.branch.of}, and credit {name} reads branches: those of some episodes alone would "
            "tell how these ended, and the expert's are not of what was explored; explore with branch.of=all."
        )
    if recipe.branch.window is not None and not credit.traits.takes_unfinished:
        raise ConfigError(
            f"branch.window is {recipe.branch.window}, and credit {name} reads how branches end; explore without "
            "branch.window, or take credit.name=slate."
        )
    if recipe.branch.search is not None:
        raise ConfigError(
            f"branch.search is set, and credit {name} reads branches: where a search has them begin is chosen by how "
            "earlier ones ended; explore without branch.search."
        )
    if recipe.branch.others == "episodes" and credit.traits.trains_branches and credit.traits.unbiased:
        raise ConfigError(
            f"branch.others is episodes, and credit {name} trains on branches: where these are would then depend on "
            "what it compares them with; explore with branch.others=tasks."
        )
    prover = recipe.branch.policy
    if prover is not None and credit.traits.trains_branches:
        raise ConfigError(
            f"branch.policy is {prover}, and credit {name} trains on branches, which must be of the policy that "
            "explored; explore without branch.policy."
        )
    if prover is not None and not credit.traits.takes_prover:
        raise ConfigError(
            f"branch.policy is {prover}, and credit {name} reads what the policy that explored would earn; explore "
            "without branch.policy, or take credit.name=pav."
        )
