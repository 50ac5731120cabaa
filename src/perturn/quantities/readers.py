"""Quantities that credits read of a policy, computed for stored episodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path
from typing import Any

from torch import Tensor

from perturn.credit import Credit
from perturn.credit.archer import Critique
from perturn.credit.group import returns_to_go
from perturn.credit.returns import Return
from perturn.credit.spa import Shares
from perturn.policy.examples import Example
from perturn.policy.logprobs import prepare
from perturn.policy.models import device, load_model
from perturn.policy.names import load_tokenizer
from perturn.policy.reference import compute_logprobs, frozen, turn_logprobs
from perturn.policy.tokens import Renderer
from perturn.policy.values import turn_features, turn_values
from perturn.quantities.answer import answer_logprobs, own_answer_logprobs
from perturn.quantities.answer_clusters import clusters_of
from perturn.quantities.contributions import action_features, turn_contributions
from perturn.quantities.critics import Critics, Learned, Rows, learn_and_judge
from perturn.quantities.feedback import feedback_gains
from perturn.settings.sections import TOKEN_BUDGET
from perturn.types import Trajectory

OF_ACTED = frozenset({"values", "contributions", "answer", "answers", "clusters", "feedback"})
"""Quantities that are read of the policy that acted."""


@dataclass(frozen=True)
class Reader:
    """An open policy that quantities are read of."""

    model: Any
    """A transformers model, prepared for that."""
    renderer: Renderer
    """Conversation -> tokens, for the model."""
    token_budget: int
    """Tokens of one pass."""


def open_reader(
    model: Any, tokenizer: Any = None, template: str | None = None, token_budget: int = TOKEN_BUDGET
) -> Reader:
    """Open a policy.

    Args:
        model: A name, a folder, or a transformers model.
        tokenizer: Of the model; None: that of its name.
        template: Jinja chat template to use instead of the tokenizer's own.
        token_budget: Tokens of one pass.
    """
    if isinstance(model, str | Path):
        tokenizer = tokenizer or load_tokenizer(str(model))
        model = load_model(str(model)).to(device())
    prepare(model)
    return Reader(model, Renderer(tokenizer, template), token_budget)


def read_acted(
    trajectories: Sequence[Trajectory], credit: Credit, reader: Reader, form: str = ""
) -> dict[str, Sequence[Any]]:
    """All quantities of OF_ACTED that a credit needs, by name.

    Args:
        trajectories: Episodes, in any order.
        credit: What reads them.
        reader: The policy that acted.
        form: Text of a turn that gives an answer, with `{answer}` where that stands, for a credit that reads answers.
    """
    found: dict[str, Sequence[Any]] = {}
    if "values" in credit.needs:
        found["values"] = values_of(trajectories, credit, reader)
    if "contributions" in credit.needs:
        found["contributions"] = contributions_of(trajectories, credit, reader)
    if "answer" in credit.needs:
        found["answer"] = answers_of(trajectories, form, reader, getattr(credit, "last_gain", True))
    if credit.needs & {"answers", "clusters"}:
        found |= own_answers_of(trajectories, credit, form, reader)
    if "feedback" in credit.needs:
        found["feedback"] = feedback_of(trajectories, str(getattr(credit, "placeholder", "")), reader)
    return found


def reference_of(trajectories: Sequence[Trajectory], reader: Reader) -> list[list[Tensor]]:
    """Log-probabilities of each turn's tokens under a policy, in nats `[trajectories][turns]`, each [tokens]."""
    rows = encoded(trajectories, reader.renderer)
    with frozen(reader.model):
        logprobs = compute_logprobs(reader.model, [row.chosen for row in rows.values()], reader.token_budget)
    found = dict(zip(rows, logprobs, strict=True))
    return [
        turn_logprobs(replace(rows[i], reference=(found[i],)), 0) if i in rows else []
        for i in range(len(trajectories))
    ]


def values_of(trajectories: Sequence[Trajectory], credit: Any, reader: Reader) -> list[list[list[float]]]:
    """V at the turns of each episode, by a head on a policy's hidden states that is fitted on other episodes.

    Args:
        trajectories: Episodes, in any order, which changes nothing; one without turns has no values.
        credit: What reads them; its `value_targets` says where V is wanted, and for what return it stands.
        reader: The policy.

    Returns:
        V, in units of reward `[trajectories][turns][tokens]`.
    """
    rows = encoded(trajectories, reader.renderer)
    order = _in_order(rows, trajectories)
    sequences = [rows[i].chosen for i in order]
    tokens = [[one.loss_turns.count(turn) for turn in range(one.turns)] for one in sequences]
    targets = credit.value_targets([trajectories[i] for i in order], tokens)
    with frozen(reader.model):
        values = turn_values(reader.model, sequences, targets, reader.token_budget)
    found = dict(zip(order, values, strict=True))
    return [found.get(i, []) for i in range(len(trajectories))]


def contributions_of(trajectories: Sequence[Trajectory], credit: Any, reader: Reader) -> list[Shares]:
    """Contributions of each turn to its episode's score, by heads on a policy's hidden states that others taught.

    Args:
        trajectories: Episodes, in any order, which changes nothing; one without turns has no contributions.
        credit: What reads them; its setting `returns`, if it has one, says which rewards count.
        reader: The policy.

    Returns:
        In units of reward, by each head; see `perturn.quantities.contributions`.
    """
    rows = encoded(trajectories, reader.renderer)
    order, scores = _in_order(rows, trajectories), scores_of(trajectories, credit)
    sequences, own = [rows[i].chosen for i in order], [scores[i] for i in order]
    with frozen(reader.model):
        shares = turn_contributions(reader.model, sequences, own, reader.token_budget)
    found = dict(zip(order, shares, strict=True))
    return [found.get(i, Shares([[]])) for i in range(len(trajectories))]


def critics_of(
    trajectories: Sequence[Trajectory],
    credit: Any,
    reader: Reader,
    before: Critics | None = None,
    seed: int = 0,
) -> Learned:
    """Q and V of each turn, by critics on a policy's hidden states that learn from these episodes first.

    Args:
        trajectories: Those of an iteration, in any order, which changes nothing; one without turns has none.
        credit: What reads them; its settings say how critics learn, and which rewards count.
        reader: The policy, the same in all iterations.
        before: The critics as the iteration before left them; None: they begin.
        seed: Of the episodes that each critic learns from.
    """
    encoded_rows = encoded(trajectories, reader.renderer)
    order = _in_order(encoded_rows, trajectories)
    sequences = [encoded_rows[i].chosen for i in order]
    if not order:
        return Learned([Critique([[]], [[]]) for _ in trajectories], before, None, None)
    rewards = getattr(credit, "returns", Return())([trajectories[i] for i in order])
    with frozen(reader.model):
        first = turn_features(
            reader.model, sequences, [[1] * len(own) for own in rewards], reader.token_budget
        )
        rows = Rows(action_features(reader.model, sequences, reader.token_budget), first, rewards)
    returns = [returns_to_go(own, credit.gamma) for own in rewards]
    learned = learn_and_judge(before, rows, returns, credit, seed)
    found = dict(zip(order, learned.critiques, strict=True))
    return replace(learned, critiques=[found.get(i, Critique([[]], [[]])) for i in range(len(trajectories))])


def scores_of(trajectories: Sequence[Trajectory], credit: Any) -> list[float]:
    """Sum of the rewards of each episode that count for a credit, in units of reward [trajectories]."""
    return [fsum(rewards) for rewards in getattr(credit, "returns", Return())(trajectories)]


def answers_of(
    trajectories: Sequence[Trajectory], form: str, reader: Reader, after_last: bool = True
) -> list[list[float]]:
    """Log-probability of the gold answer around each turn of each episode; see `perturn.quantities.answer`.

    Args:
        trajectories: Episodes, in any order.
        form: Text of a turn that gives an answer, with `{answer}` where that stands.
        reader: The policy.
        after_last: Whether it is asked for after the last turn too.

    Returns:
        Mean over the answer's tokens, in nats `[trajectories][turns + 1]`; NaN where it is not known, or not asked for.
    """
    return answer_logprobs(reader.model, reader.renderer, trajectories, form, reader.token_budget, after_last)


def own_answers_of(
    trajectories: Sequence[Trajectory], credit: Any, form: str, reader: Reader
) -> dict[str, list[Any]]:
    """Clusters of the final answers of episodes, and the log-probability of those that stand for each episode's own.

    Args:
        trajectories: Episodes, in any order.
        credit: What reads them; its settings say which answers are the same; see `perturn.quantities.answer_clusters`.
        form: Text of a turn that gives an answer, with `{answer}` where that stands.
        reader: The policy.

    Returns:
        `clusters`, of each episode, -1 where it gave no answer [trajectories]; `answers`, mean over an answer's tokens,
        in nats `[trajectories][turns + 1][answers]`, NaN where it is not known.
    """
    clusters, texts = clusters_of(trajectories, credit, form)
    answers = own_answer_logprobs(
        reader.model, reader.renderer, trajectories, texts, form, reader.token_budget
    )
    return {"clusters": clusters, "answers": answers}


def feedback_of(trajectories: Sequence[Trajectory], placeholder: str, reader: Reader) -> list[list[float]]:
    """How much likelier the reply to each turn made the turn after it; see `perturn.quantities.feedback`.

    Args:
        trajectories: Episodes, in any order.
        placeholder: Text in the stead of a reply.
        reader: The policy.

    Returns:
        Mean over the tokens of the next turn, in nats `[trajectories][turns]`; NaN where it is not known.
    """
    return feedback_gains(reader.model, reader.renderer, trajectories, placeholder, reader.token_budget)


def _in_order(rows: Iterable[int], trajectories: Sequence[Trajectory]) -> list[int]:
    """Indices by task, sample and policy, so that the order of the episodes deals none of them otherwise."""
    return sorted(rows, key=lambda i: (trajectories[i].key, trajectories[i].policy))


def encoded(trajectories: Sequence[Trajectory], renderer: Renderer) -> dict[int, Example]:
    """The trajectories that have turns as tokens, by index."""
    return {
        i: Example(renderer.encode(one, every_turn=True), trajectories=(one,), whole=(one,))
        for i, one in enumerate(trajectories)
        if one.turns
    }
