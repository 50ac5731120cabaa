"""Quantities that credits read of the policies and the world of a run, computed for its episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perturn.credit import Credit
from perturn.credit.returns import Return
from perturn.data.groups import counted
from perturn.data.paths import RunPaths
from perturn.errors import ConfigError, RunError
from perturn.policy.credits import reads_reward_model
from perturn.policy.sampled import Needed
from perturn.policy.templates import chat_template
from perturn.quantities.critics import Critics
from perturn.quantities.readers import OF_ACTED, Reader, critics_of, open_reader, read_acted, reference_of
from perturn.quantities.tool_matches import matches_of
from perturn.run.answers import answer_form, check_gold_answers
from perturn.run.branch import branch_values, stored_branches
from perturn.run.members import failures_of
from perturn.run.panels import seed_of
from perturn.run.progress import console
from perturn.settings.recipe import Recipe
from perturn.settings.sections import TOKEN_BUDGET
from perturn.settings.stages import mark, policy_of, reward_model_of, stages
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
    iteration: int = 1,
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
        iteration: Whose branches, and whose reward model, it may read.
        critics: As the iteration before left them; None: they begin. What they are now is in `critics` of the result, a
            `perturn.quantities.critics.Learned`.

    Raises:
        PerturnError: If the policy that it reads is not there, or has other tokens than its reference, no episode was
            played on, the world has no gold calls to match, the tasks have no gold answer, or the environment does not
            say how one is given.
    """
    found: dict[str, Sequence[Any]] = {}
    if "reference" in credit.needs:
        theirs = open_policy(paths, recipe, reference)
        found["reference"] = reference_of(episodes, theirs)
        if "progress" in credit.needs:
            found["progress"] = _progress(credit, episodes, paths, recipe, theirs, reference, iteration)
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
        branches = stored_branches(paths, recipe, mark(recipe, iteration))
        found["branches"] = branch_values(episodes, counted(branches, failures_of(recipe)), returns)
    return found


def progress_policy(credit: Credit, recipe: Recipe, iteration: int) -> str:
    """The policy whose log-probabilities are a credit's `progress`: the one that it names, else of the run.

    That is the reward model of the iteration, or the policy that acted in it.
    """
    named = getattr(credit, "checkpoint", None)
    if named is not None:
        return str(named)
    return (
        reward_model_of(recipe, iteration) if reads_reward_model(credit) else policy_of(recipe, iteration - 1)
    )


def is_own_reference(credit: Credit, recipe: Recipe, references: Mapping[int, str]) -> bool:
    """Whether a credit would compare a policy with itself in every iteration, so that `progress` says nothing.

    Args:
        credit: What reads it.
        recipe: Of the run.
        references: Of each iteration.
    """
    return all(progress_policy(credit, recipe, number) == name for number, name in references.items())


def is_of_run(recipe: Recipe, name: str) -> bool:
    """Whether a policy is one of the run, by its name."""
    return name == "base" or name in {stage.policy for stage in stages(recipe) if stage.command == "train"}


def _progress(
    credit: Credit,
    episodes: Sequence[Trajectory],
    paths: RunPaths,
    recipe: Recipe,
    theirs: Reader,
    reference: str,
    iteration: int,
) -> Sequence[Any]:
    """Log-probabilities under the policy that has made progress, as `reference_of` gives them.

    Raises:
        PerturnError: If it is not there, or it has other tokens than the reference.
    """
    name = progress_policy(credit, recipe, iteration)
    if name == reference:
        console.print(
            f"progress is 0 at every turn: policy {name} is its own reference; the outcome alone counts"
        )
        return reference_of(episodes, theirs)
    ours = open_policy(paths, recipe, name) if is_of_run(recipe, name) else _open_other(recipe, name)
    vocabularies = [reader.renderer.tokenizer.get_vocab() for reader in (ours, theirs)]
    if vocabularies[0] != vocabularies[1]:
        raise ConfigError(
            f"credit.checkpoint: {name} has other tokens than policy {reference}, so the two cannot be compared; name "
            "a policy that was trained from the same model."
        )
    return reference_of(episodes, ours)


def _open_other(recipe: Recipe, name: str) -> Reader:
    """Open a policy that is none of the run: a folder or a Hub id."""
    budget = recipe.align.token_budget if recipe.align else TOKEN_BUDGET
    return open_reader(name, None, chat_template(recipe.model), budget)


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
        others = " or ".join(
            f"--reference {each}" for each in ("sft", "base") if each == "base" or recipe.sft
        )
        raise RunError(
            f"the credit reads policy {name!r}, and {folder} is not there; name one that is, such as {others}."
        )
    return open_reader(folder, None, template, budget)
