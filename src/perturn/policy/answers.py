"""How likely a policy finds the gold answer around each turn of an episode, asked in passes that share the episode."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from math import nan
from typing import Any

from perturn.policy.branches import Branch, as_sequences, branches
from perturn.policy.logprobs import exact_length
from perturn.policy.reference import compute_logprobs, frozen
from perturn.policy.tokens import Renderer
from perturn.settings.sections import TOKEN_BUDGET
from perturn.types import Trajectory, failed

_logger = logging.getLogger(__name__)


def answer_logprobs(
    model: Any,
    renderer: Renderer,
    trajectories: Sequence[Trajectory],
    form: str,
    token_budget: int = TOKEN_BUDGET,
) -> list[list[float]]:
    """Mean log-probability of the gold answer's tokens before each turn and after the last one.

        log P_t = mean_j log pi(a_j | what the policy had seen before turn t, the turn's text before a, a_<j)

    Each is that of the answer in a turn of the same text; only tokens that hold a character of the answer count. The
    episodes of a task are computed together, and what several contexts begin with once.

    Args:
        model: A causal language model on the device to compute on.
        renderer: Conversation -> tokens, for the model.
        trajectories: Episodes, in any order.
        form: Text of a turn that gives an answer, with `{answer}` where that stands.
        token_budget: Tokens of one pass.

    Returns:
        In nats `[trajectories][turns + 1]`. NaN for an episode that FAILED or has no turn, where the answer would end
        beyond the model's context, and after the last turn where the chat template lets nobody speak twice in a row.

    Raises:
        DataError: If a task has no gold answer.
        ModelError: If the template or the tokenizer writes another text than the answer.
    """
    found = [[nan] * (len(one.turns) + 1) for one in trajectories]
    limit, left_out = exact_length(model), 0
    for members in _by_task(trajectories):
        fitting: dict[int, dict[int, Branch]] = {}
        for i in members:
            all_of_it = [(t, one) for t, one in enumerate(branches(renderer, trajectories[i], form)) if one]
            fits = {t: one for t, one in all_of_it if limit is None or one.stop <= limit}
            left_out += len(all_of_it) - len(fits)
            if fits:
                fitting[i] = fits
        sequences = [as_sequences(list(of_one.values())) for of_one in fitting.values()]
        with frozen(model):
            logprobs = compute_logprobs(model, sequences, token_budget)
        for (i, of_one), own in zip(fitting.items(), logprobs, strict=True):
            parts = own.double().split([one.stop - one.start for one in of_one.values()])
            for t, part in zip(of_one, parts, strict=True):
                found[i][t] = float(part.mean())
    if left_out:
        _logger.warning(
            "%d answers would end beyond the model's context of %s tokens; their likelihood is not known.",
            left_out,
            limit,
        )
    return found


def _by_task(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """Indices of the episodes of each task that the policy can be asked in."""
    members: dict[str, list[int]] = defaultdict(list)
    for i, one in enumerate(trajectories):
        if one.turns and not failed(one):
            members[one.task.id].append(i)
    return list(members.values())
