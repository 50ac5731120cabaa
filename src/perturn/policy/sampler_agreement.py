"""Differences between the engine's log-probabilities at sampling and the log-probabilities computed in training."""

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
    """Statistics of the absolute differences of log-probabilities over sampled tokens, in nats; NaN without tokens."""

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
    """Compare an engine's log-probabilities with the packed computation of training, on the engine's own episodes.

    Args:
        model: The policy that sampled the episodes, on the device of the computation. Its train or eval mode is kept.
        trajectories: Episodes; turns whose actions have no log-probabilities are ignored.
        renderer: Converts conversations to tokens, as in training.
        token_budget: Largest number of tokens in one forward pass.

    Raises:
        DataError: If the tokens in training differ from the sampled tokens.
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
    """Return the absolute differences, in nats, over the tokens that have a log-probability from sampling [tokens].

    Args:
        trajectory: The trajectory as recorded.
        encoded: The trajectory as tokens; turns that are dropped or masked there are ignored.
        computed: Log-probabilities of its loss tokens, computed as in training, in nats [loss tokens].

    Raises:
        DataError: If the tokens of a turn in training differ from the sampled tokens.
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
    """Return the statistics over the concatenated differences, in nats [tokens of each part]."""
    values = torch.cat([torch.empty(0), *parts]).double()
    if not len(values):
        return Agreement(0, math.nan, math.nan, math.nan, math.nan)
    middle, high = values.quantile(torch.tensor([0.5, 0.99], dtype=torch.double)).tolist()
    return Agreement(len(values), float(values.mean()), middle, high, float(values.max()))
