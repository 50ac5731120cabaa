"""Quantities that credits read of the policies and the world of a run, computed for its episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perturn.credit import Credit
from perturn.credit.returns import Return
from perturn.data.paths import RunPaths
from perturn.errors import RunError
from perturn.policy.critics import Critics
from perturn.policy.sampled import Needed
from perturn.policy.templates import chat_template
from perturn.run.answers import answer_form, check_gold_answers
from perturn.run.branch import branch_values, stored_branches
from perturn.run.matches import matches_of
from perturn.run.panels import seed_of
from perturn.run.readings import OF_ACTED, Reader, critics_of, open_reader, read_acted, reference_of
from perturn.settings.recipe import Recipe
from perturn.settings.sections import TOKEN_BUDGET
from perturn.types import Trajectory


def compute_needed(
    credit: Credit,
    episodes: Sequence[Trajectory],
    paths: RunPaths,
    recipe: Recipe,
    *,
    reference: str,
    acted: str,
    judged: str,
    mark: str = "",
    critics: Critics | None = None,
) -> Needed:
    """Quantities that a credit reads of policies and the world of the run.

    Args:
        credit: What reads them.
        episodes: What it weighs.
        paths: Of the run.
        recipe: Of the run.
        reference: Policy whose log-probabilities it may read.
        acted: Policy on whose hidden states values and contributions are fitted, and that is asked for answers, or for
            its turns without what it was told.
        judged: Policy on whose hidden states critics learn, the same in all iterations.
        mark: Of the iteration whose branches it may read.
        critics: As the iteration before left them; None: they begin. What they are now is in `critics` of the result, a
            `perturn.policy.critics.Learned`.

    Raises:
        PerturnError: If the policy that it reads is not there, no episode was played on, the world has no gold calls to
            match, the tasks have no gold answer, or the environment does not say how one is given.
    """
    found: dict[str, Sequence[Any]] = {}
    if "reference" in credit.needs:
        found["reference"] = reference_of(episodes, open_policy(paths, recipe, reference))
    if credit.needs & OF_ACTED:
        form = answer_form(recipe) if credit.needs & {"answer", "answers", "clusters"} else ""
        if "answer" in credit.needs:
            check_gold_answers(episodes)
        found |= read_acted(episodes, credit, open_policy(paths, recipe, acted), form)
    if "critics" in credit.needs:
        reader, seed = open_policy(paths, recipe, judged), seed_of(recipe.seed, "critics")
        found["critics"] = critics_of(episodes, credit, reader, critics, seed)
    if "matches" in credit.needs:
        found["matches"] = matches_of(episodes, credit, recipe)
    if "branches" in credit.needs:
        returns = getattr(credit, "returns", Return())
        found["branches"] = branch_values(episodes, stored_branches(paths, recipe, mark), returns)
    return found


def open_policy(paths: RunPaths, recipe: Recipe, name: str) -> Reader:
    """Open a policy of the run to be read.

    Raises:
        RunError: If it is not there.
    """
    budget, template = (
        recipe.align.token_budget if recipe.align else TOKEN_BUDGET,
        chat_template(recipe.model),
    )
    if name == "base" and recipe.base is None:
        return open_reader(recipe.model.name, None, template, budget)
    folder = paths.checkpoint(name)
    if not (folder / "config.json").is_file():
        raise RunError(
            f"the credit reads policy {name!r}, and {folder} is not there; name one that is, such as --reference sft "
            "or --reference base."
        )
    return open_reader(folder, None, template, budget)
