"""Difference between the log-probabilities of sampling and the log-probabilities that training computes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perturn.chat.tokens import Encoded, Renderer
from perturn.config.sections import TOKEN_BUDGET
from perturn.errors import DataError
from perturn.policy.reference import compute_logprobs
from perturn.types import Trajectory


@dataclass(frozen=True)
class Agreement:
    """Absolute differences of log-probabilities over sampled tokens, in nats; NaN where there is no token."""

    tokens: int
    mean: float
    median: float
    p99: float
    max: float

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens: median {self.median:.2g}, mean {self.mean:.2g}, p99 {self.p99:.2g}, "
            f"max {self.max:.2g} nats"
        )


@torch.no_grad()
def agreement(
    model: Any, trajectories: Sequence[Trajectory], renderer: Renderer, token_budget: int = TOKEN_BUDGET
) -> Agreement:
    """Compare an engine with the packed computation that training uses, on episodes that the engine has played.

    Args:
        model: The policy that acted, on the device to compute on. Its mode is kept.
        trajectories: Episodes; turns whose actions have no log-probabilities are left out.
        renderer: Conversation -> tokens, as training makes it.
        token_budget: Tokens of one pass.

    Raises:
        DataError: If training would see other tokens than were sampled.
    """
    played = [one for one in trajectories if any(turn.action.logprobs for turn in one.turns)]
    sequences = [renderer.encode(one) for one in played]
    was_training = model.training
    model.eval()
    computed = compute_logprobs(model, sequences, token_budget)
    model.train(was_training)
    return summary(
        differences(one, sequence, logprobs)
        for one, sequence, logprobs in zip(played, sequences, computed, strict=True)
    )


def differences(trajectory: Trajectory, encoded: Encoded, computed: Tensor) -> Tensor:
    """Return absolute differences, in nats, over the tokens that have a log-probability from sampling [tokens].

    Args:
        trajectory: As it was played.
        encoded: As training sees it; turns that it leaves out, or masks, are left out here.
        computed: Log-probabilities of its loss tokens, as training computes them [loss tokens].

    Raises:
        DataError: If training would see other tokens of a turn than were sampled.
    """
    loss_turns = torch.tensor(encoded.loss_turns)
    trained = defaultdict[int, list[int]](list)
    for token, index in zip(encoded.ids, encoded.turn, strict=True):
        trained[index].append(token)
    found = [torch.empty(0)]
    for index, turn in enumerate(trajectory.turns):
        seen = tuple(trained[index])
        if not seen:
            continue
        if turn.action.token_ids is not None and seen != turn.action.token_ids:
            raise DataError(
                f"task {trajectory.task.id!r}: turn {index} was sampled as {turn.action.token_ids}, but training sees "
                f"{seen}; give the renderer the tokenizer and chat template that the engine had."
            )
        if turn.action.logprobs is not None:
            found.append((computed[loss_turns == index] - torch.tensor(turn.action.logprobs)).abs())
    return torch.cat(found)


def summary(parts: Iterable[Tensor]) -> Agreement:
    """Return the statistics of differences, all together."""
    values = torch.cat([torch.empty(0), *parts]).double()
    if not len(values):
        return Agreement(0, math.nan, math.nan, math.nan, math.nan)
    middle, high = values.quantile(torch.tensor([0.5, 0.99], dtype=torch.double)).tolist()
    return Agreement(len(values), float(values.mean()), middle, high, float(values.max()))
