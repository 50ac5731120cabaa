"""Quantities that credits read of a policy or a world, computed for stored episodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import fsum
from pathlib import Path
from typing import Any

from torch import Tensor

from perturn.credit import Credit
from perturn.credit.returns import Return
from perturn.credit.spa import Shares
from perturn.data.paths import RunPaths
from perturn.data.seals import read_manifest, refuse_damage
from perturn.data.store import read_trajectories
from perturn.errors import RunError
from perturn.policy.answers import answer_logprobs, own_answer_logprobs
from perturn.policy.contributions import turn_contributions
from perturn.policy.examples import Example, encode_example
from perturn.policy.feedback import feedback_gains
from perturn.policy.logprobs import prepare
from perturn.policy.models import device, load_model
from perturn.policy.names import load_tokenizer
from perturn.policy.reference import compute_logprobs, frozen, turn_logprobs
from perturn.policy.sampled import Needed
from perturn.policy.templates import chat_template
from perturn.policy.tokens import Renderer
from perturn.policy.values import turn_values
from perturn.run.answers import answer_form, check_gold_answers
from perturn.run.branch import branch_values
from perturn.run.clusters import clusters_of
from perturn.run.matches import matches_of
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
    mark: str = "",
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
        mark: Of the iteration whose branches it may read.

    Raises:
        PerturnError: If the policy that it reads is not there, no episode was played on, the world has no gold calls to
            match, the tasks have no gold answer, or the environment does not say how one is given.
    """
    found: dict[str, Sequence[Any]] = {}
    template = chat_template(recipe.model)
    budget = recipe.align.token_budget if recipe.align else TOKEN_BUDGET
    if "reference" in credit.needs:
        found["reference"] = reference_of(episodes, _policy(paths, recipe, reference), template=template)
    if "values" in credit.needs:
        model = _policy(paths, recipe, acted)
        found["values"] = values_of(episodes, credit, model, template=template, token_budget=budget)
    if "contributions" in credit.needs:
        model = _policy(paths, recipe, acted)
        found["contributions"] = contributions_of(
            episodes, credit, model, template=template, token_budget=budget
        )
    if "matches" in credit.needs:
        found["matches"] = matches_of(episodes, credit, recipe)
    if "branches" in credit.needs:
        found["branches"] = branch_values(
            episodes, _branches(paths, recipe, mark), getattr(credit, "returns", Return())
        )
    if "answer" in credit.needs:
        form = answer_form(recipe)
        check_gold_answers(episodes)
        model = _policy(paths, recipe, acted)
        found["answer"] = answers_of(episodes, form, model, template=template, token_budget=budget)
    if credit.needs & {"answers", "clusters"}:
        form, model = answer_form(recipe), _policy(paths, recipe, acted)
        found |= own_answers_of(episodes, credit, form, model, template=template, token_budget=budget)
    if "feedback" in credit.needs:
        model, placeholder = _policy(paths, recipe, acted), str(getattr(credit, "placeholder", ""))
        found["feedback"] = feedback_of(episodes, placeholder, model, template=template, token_budget=budget)
    return found


def _branches(paths: RunPaths, recipe: Recipe, mark: str) -> list[Trajectory]:
    """Episodes of an iteration that were played on from turns of explored ones.

    Raises:
        RunError: If they are not there, not all of them are, or their file is damaged.
    """
    file = paths.trajectories(f"branch{mark}")
    if recipe.branch is None:
        raise RunError(
            f"the credit reads episodes that were played on from turns of explored ones, and {file} is not there; "
            "explore with a section `branch` in the recipe."
        )
    manifest = read_manifest(paths.folder) or {}
    if not manifest.get("stages", {}).get(f"branch{mark}", {}).get("done"):
        raise RunError(f"{file} is not finished; run: perturn run {paths.folder}")
    seal = manifest.get("files", {}).get(paths.name(file))
    refuse_damage(paths.folder, {paths.name(file): seal} if seal else {})
    return list(read_trajectories(file))


def _policy(paths: RunPaths, recipe: Recipe, name: str) -> str:
    """Model name or folder of a policy that a credit reads."""
    folder = paths.checkpoint(name)
    if name == "base" and recipe.base is None:
        return recipe.model.name
    if not (folder / "config.json").is_file():
        raise RunError(
            f"the credit reads policy {name!r}, and {folder} is not there; name one that is, such as --reference sft "
            "or --reference base."
        )
    return str(folder)


def reference_of(
    trajectories: Sequence[Trajectory], model: Any, tokenizer: Any = None, template: str | None = None
) -> list[list[Tensor]]:
    """Log-probabilities of each turn's tokens under a policy, in nats `[trajectories][turns]`, each [tokens].

    Args:
        trajectories: Episodes; one without turns has nothing to compute.
        model: A name, a folder, or a transformers model.
        tokenizer: Of the model; None: that of its name.
        template: Jinja chat template to use instead of the tokenizer's own.
    """
    model, renderer = _opened(model, tokenizer, template)
    rows = _encoded(trajectories, renderer)
    with frozen(model):
        logprobs = compute_logprobs(model, [row.chosen for row in rows.values()])
    found = dict(zip(rows, logprobs, strict=True))
    return [
        turn_logprobs(replace(rows[i], reference=(found[i],)), 0) if i in rows else []
        for i in range(len(trajectories))
    ]


def values_of(
    trajectories: Sequence[Trajectory],
    credit: Any,
    model: Any,
    tokenizer: Any = None,
    template: str | None = None,
    token_budget: int = TOKEN_BUDGET,
) -> list[list[list[float]]]:
    """V at the turns of each episode, by a head on a policy's hidden states that is fitted on other episodes.

    Args:
        trajectories: Episodes, in any order, which changes nothing; one without turns has no values.
        credit: What reads them; its `value_targets` says where V is wanted, and for what return it stands.
        model: As `reference_of` has it.
        tokenizer: As `reference_of` has it.
        template: As `reference_of` has it.
        token_budget: Tokens of one pass.

    Returns:
        V, in units of reward `[trajectories][turns][tokens]`.
    """
    model, renderer = _opened(model, tokenizer, template)
    rows = _encoded(trajectories, renderer)
    order = _in_order(rows, trajectories)
    sequences = [rows[i].chosen for i in order]
    tokens = [[one.loss_turns.count(turn) for turn in range(one.turns)] for one in sequences]
    targets = credit.value_targets([trajectories[i] for i in order], tokens)
    with frozen(model):
        found = dict(zip(order, turn_values(model, sequences, targets, token_budget), strict=True))
    return [found.get(i, []) for i in range(len(trajectories))]


def contributions_of(
    trajectories: Sequence[Trajectory],
    credit: Any,
    model: Any,
    tokenizer: Any = None,
    template: str | None = None,
    token_budget: int = TOKEN_BUDGET,
) -> list[Shares]:
    """Contributions of each turn to its episode's score, by heads on a policy's hidden states that others taught.

    Args:
        trajectories: Episodes, in any order, which changes nothing; one without turns has no contributions.
        credit: What reads them; its setting `returns`, if it has one, says which rewards count.
        model: As `reference_of` has it.
        tokenizer: As `reference_of` has it.
        template: As `reference_of` has it.
        token_budget: Tokens of one pass.

    Returns:
        In units of reward, by each head; see `perturn.policy.contributions`.
    """
    model, renderer = _opened(model, tokenizer, template)
    rows = _encoded(trajectories, renderer)
    order, scores = _in_order(rows, trajectories), scores_of(trajectories, credit)
    sequences = [rows[i].chosen for i in order]
    with frozen(model):
        shares = turn_contributions(model, sequences, [scores[i] for i in order], token_budget)
    found = dict(zip(order, shares, strict=True))
    return [found.get(i, Shares([[]])) for i in range(len(trajectories))]


def scores_of(trajectories: Sequence[Trajectory], credit: Any) -> list[float]:
    """Sum of the rewards of each episode that count for a credit, in units of reward [trajectories]."""
    return [fsum(rewards) for rewards in getattr(credit, "returns", Return())(trajectories)]


def answers_of(
    trajectories: Sequence[Trajectory],
    form: str,
    model: Any,
    tokenizer: Any = None,
    template: str | None = None,
    token_budget: int = TOKEN_BUDGET,
) -> list[list[float]]:
    """Log-probability of the gold answer around each turn of each episode; see `perturn.policy.answers`.

    Args:
        trajectories: Episodes, in any order.
        form: Text of a turn that gives an answer, with `{answer}` where that stands.
        model: As `reference_of` has it.
        tokenizer: As `reference_of` has it.
        template: As `reference_of` has it.
        token_budget: Tokens of one pass.

    Returns:
        Mean over the answer's tokens, in nats `[trajectories][turns + 1]`; NaN where it is not known.
    """
    model, renderer = _opened(model, tokenizer, template)
    return answer_logprobs(model, renderer, trajectories, form, token_budget)


def own_answers_of(
    trajectories: Sequence[Trajectory],
    credit: Any,
    form: str,
    model: Any,
    tokenizer: Any = None,
    template: str | None = None,
    token_budget: int = TOKEN_BUDGET,
) -> dict[str, list[Any]]:
    """Clusters of the final answers of episodes, and the log-probability of those that stand for each episode's own.

    Args:
        trajectories: Episodes, in any order.
        credit: What reads them; its settings say which answers are the same; see `perturn.run.clusters`.
        form: Text of a turn that gives an answer, with `{answer}` where that stands.
        model: As `reference_of` has it.
        tokenizer: As `reference_of` has it.
        template: As `reference_of` has it.
        token_budget: Tokens of one pass.

    Returns:
        `clusters`, of each episode, -1 where it gave no answer [trajectories]; `answers`, mean over an answer's tokens,
        in nats `[trajectories][turns + 1][answers]`, NaN where it is not known.
    """
    clusters, texts = clusters_of(trajectories, credit, form)
    model, renderer = _opened(model, tokenizer, template)
    answers = own_answer_logprobs(model, renderer, trajectories, texts, form, token_budget)
    return {"clusters": clusters, "answers": answers}


def feedback_of(
    trajectories: Sequence[Trajectory],
    placeholder: str,
    model: Any,
    tokenizer: Any = None,
    template: str | None = None,
    token_budget: int = TOKEN_BUDGET,
) -> list[list[float]]:
    """How much likelier the reply to each turn made the turn after it; see `perturn.policy.feedback`.

    Args:
        trajectories: Episodes, in any order.
        placeholder: Text in the stead of a reply.
        model: As `reference_of` has it.
        tokenizer: As `reference_of` has it.
        template: As `reference_of` has it.
        token_budget: Tokens of one pass.

    Returns:
        Mean over the tokens of the next turn, in nats `[trajectories][turns]`; NaN where it is not known.
    """
    model, renderer = _opened(model, tokenizer, template)
    return feedback_gains(model, renderer, trajectories, placeholder, token_budget)


def _opened(model: Any, tokenizer: Any, template: str | None) -> tuple[Any, Renderer]:
    """The model, loaded and prepared, and its renderer."""
    if isinstance(model, str | Path):
        tokenizer = tokenizer or load_tokenizer(str(model))
        model = load_model(str(model)).to(device())
    renderer = Renderer(tokenizer, template)
    prepare(model)
    return model, renderer


def _in_order(rows: Iterable[int], trajectories: Sequence[Trajectory]) -> list[int]:
    """Indices by task, sample and policy, so that the order of the episodes deals none of them otherwise."""
    return sorted(rows, key=lambda i: (trajectories[i].key, trajectories[i].policy))


def _encoded(trajectories: Sequence[Trajectory], renderer: Renderer) -> dict[int, Example]:
    """The trajectories that have turns as tokens, by index."""
    return {i: encode_example(one, renderer, None) for i, one in enumerate(trajectories) if one.turns}
