"""Quantity `answer`: how likely a policy finds answers around each turn, asked in passes that share the episode."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from math import nan
from typing import Any, ClassVar

import torch
from torch import Tensor

from perturn.chat.tokens import Renderer
from perturn.config.sections import TOKEN_BUDGET
from perturn.errors import DataError, ModelError
from perturn.needs import Answer, Need
from perturn.policy.logprobs import exact_length
from perturn.policy.reference import compute_logprobs, frozen
from perturn.quantities.answer_turns import Branch, as_sequences, branches_of, gold_answer
from perturn.quantities.protocol import ACTED, Computed, Ground, Planned, Quantity, QuantityTraits, Source
from perturn.quantities.readers import Reader
from perturn.types import Trajectory, failed

_logger = logging.getLogger(__name__)

Written = Sequence[Sequence[Branch] | None]
"""Branches of an episode, a row before each turn and one after the last; empty: none."""


def answer_logprobs(
    model: Any,
    renderer: Renderer,
    trajectories: Sequence[Trajectory],
    form: str,
    token_budget: int = TOKEN_BUDGET,
    after_last: bool = True,
) -> list[list[float]]:
    """Return the mean log-probability of the gold answer's tokens before each turn and after the last one.

        log P_t = mean_j log pi(a_j | what the policy had seen before turn t, the turn's text before a, a_<j)

    Each belongs to the answer in a turn of the same text; only tokens that hold a character of the answer count. The
    episodes of a task are computed together, and what several contexts begin with once.

    Args:
        model: A causal language model on the device to compute on.
        renderer: Conversation -> tokens, for the model.
        trajectories: Episodes, in any order.
        form: Text of a turn that gives an answer, with `{answer}` where that stands.
        token_budget: Tokens of one pass.
        after_last: Whether it is asked for after the last turn too; else that is NaN.

    Returns:
        In nats `[trajectories][turns + 1]`. NaN for an episode that FAILED or has no turn, and where the answer would
        end beyond the model's context. Also NaN after the last turn where the chat template lets nobody speak twice in
        a row.

    Raises:
        DataError: If a task has no gold answer.
        ModelError: If the template or the tokenizer writes another text than the answer.
    """

    def write(i: int) -> Written:
        one = trajectories[i]
        found = branches_of(renderer, one, form, [gold_answer(one.task)])
        return found if after_last else [*found[:-1], None]

    found = _logprobs(model, trajectories, write, token_budget)
    return [[each[0] if each else nan for each in of_one] for of_one in found]


def own_answer_logprobs(
    model: Any,
    renderer: Renderer,
    trajectories: Sequence[Trajectory],
    answers: Sequence[Sequence[str]],
    form: str,
    token_budget: int = TOKEN_BUDGET,
) -> list[list[list[float]]]:
    """Return `answer_logprobs` for answers that policies gave, several an episode.

    Args:
        model: A causal language model on the device to compute on.
        renderer: Conversation -> tokens, for the model.
        trajectories: Episodes, in any order.
        answers: Texts to ask for in each episode, none of them empty `[trajectories][answers]`.
        form: Text of a turn that gives an answer, with `{answer}` where that stands.
        token_budget: Tokens of one pass.

    Returns:
        In nats `[trajectories][turns + 1][answers]`, NaN as `answer_logprobs` has it. Of an episode that FAILED or has
        no turn, nothing; answers that cannot be written in it are left out, which is logged.
    """
    left_out = 0

    def write(i: int) -> Written:
        nonlocal left_out
        found = _writable(renderer, trajectories[i], form, answers[i])
        left_out += len(answers[i]) - _count(found)
        return found

    found = _logprobs(model, trajectories, write, token_budget)
    if left_out:
        _logger.warning(
            "%d answers that the policy gave cannot be written as turns; their likelihood is not asked for.",
            left_out,
        )
    return found


def _count(written: Written) -> int:
    """Return how many answers are asked for in an episode."""
    return len(written[0] or ()) if written else 0


def _writable(renderer: Renderer, trajectory: Trajectory, form: str, answers: Sequence[str]) -> Written:
    """Return branches of the answers that template and tokenizer write as they are."""

    def write(texts: Sequence[str]) -> Written:
        try:
            return branches_of(renderer, trajectory, form, texts) if texts else []
        except (ModelError, DataError):  # what a policy wrote is data
            return []

    return write(answers) or write([each for each in answers if write([each])])


def _logprobs(
    model: Any, trajectories: Sequence[Trajectory], write: Callable[[int], Written], token_budget: int
) -> list[list[list[float]]]:
    """Return the mean log-probability of each requested answer, in nats `[trajectories][turns + 1][answers]`."""
    found: list[list[list[float]]] = [[[] for _ in range(len(one.turns) + 1)] for one in trajectories]
    limit, left_out = exact_length(model), 0
    for members in _by_task(trajectories):
        fitting: dict[int, dict[tuple[int, int], Branch]] = {}
        for i in members:
            written = write(i)
            found[i] = [[nan] * _count(written) for _ in found[i]]
            every = {(t, k): one for t, each in enumerate(written) for k, one in enumerate(each or ())}
            fits = {at: one for at, one in every.items() if limit is None or one.stop <= limit}
            left_out += len(every) - len(fits)
            if fits:
                fitting[i] = fits
        sequences = [as_sequences(list(of_one.values())) for of_one in fitting.values()]
        with frozen(model):
            logprobs = compute_logprobs(model, sequences, token_budget)
        for (i, of_one), own in zip(fitting.items(), logprobs, strict=True):
            parts = own.double().split([one.stop - one.start for one in of_one.values()])
            for (t, k), part in zip(of_one, parts, strict=True):
                found[i][t][k] = float(part.mean())
    if left_out:
        _logger.warning(
            "%d answers would end beyond the model's context of %s tokens; their likelihood is not known.",
            left_out,
            limit,
        )
    return found


def _by_task(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """Return indices of the episodes of each task that the policy can be asked in."""
    members: dict[str, list[int]] = defaultdict(list)
    for i, one in enumerate(trajectories):
        if one.turns and not failed(one):
            members[one.task.id].append(i)
    return list(members.values())


def answers_of(
    trajectories: Sequence[Trajectory], form: str, reader: Reader, after_last: bool = True
) -> list[list[float]]:
    """Return `answer_logprobs` by an open policy, in nats `[trajectories][turns + 1]`."""
    return answer_logprobs(reader.model, reader.renderer, trajectories, form, reader.token_budget, after_last)


class GoldAnswer(Quantity):
    """Mean log-probability of the gold answer's tokens before each turn and after the last one: `answer_logprobs`.

    Given as `answer`, in nats `[trajectories][turns + 1]`, with NaN where it is not known, as for all of an episode
    that FAILED. Tasks hold their gold answer as a text in `data["answer"]`.
    """

    traits: ClassVar[QuantityTraits] = QuantityTraits(
        "passes of the policy that acted over the episodes, and over an answer at each turn",
        passes=1,
        policies=frozenset({ACTED}),
        reads_answers=True,
    )
    request: ClassVar[type[Need]] = Answer

    def check(self, request: Answer, planned: Planned) -> None:
        """Reject tasks without a gold answer, and a world that does not say how one is given.

        Raises:
            PerturnError: Saying what is missing.
        """
        if not planned.stored:
            check_gold(planned)

    def compute(self, request: Answer, episodes: Sequence[Trajectory], source: Source) -> Computed:
        """Compute the log-probabilities under the policy that acted.

        Raises:
            DataError: If a task has no gold answer.
        """
        form = source.answer_form()
        for one in episodes:
            if one.turns and not failed(one):
                gold_answer(one.task)
        return Computed(answers_of(episodes, form, source.policy(ACTED), request.last_gain))

    def exact(self, request: Answer, ground: Ground) -> list[Tensor]:
        """Return log p before each turn of each episode and after its last, in nats [turns + 1].

        p is the chance of a success: a policy that is calibrated knows the answer as often as it will give it. After
        the last turn it is 1 or 0.
        """
        every = ground.episodes
        return [
            torch.tensor(
                [*(every.chance(step.state, t) for t, step in enumerate(steps)), float(end.success)],
                dtype=torch.float64,
            ).log()
            for steps, end in zip(every.steps, every.ends, strict=True)
        ]


def check_gold(planned: Planned) -> None:
    """Reject to ask for the gold answer where tasks have none, or nothing says how one is given.

    Raises:
        PerturnError: Saying what is missing.
    """
    planned.answer_form()
    for task in planned.tasks:
        gold_answer(task)
