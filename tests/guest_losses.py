"""Third-party losses and a per-token input, written only against the public interface."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.nn import functional as F

from perturn.credit.single_turn import Uniform
from perturn.losses import LossTraits
from perturn.losses.ppo_clip import AGGREGATES, PPOClip
from perturn.losses.token_inputs import TokenInputTraits


@dataclass(frozen=True)
class EntropyBonus(PPOClip):
    """Loss ppo-clip minus `bonus` times the entropy of the policy, averaged as `aggregate` says."""

    bonus: float = 0.1

    @property
    def traits(self):
        """Traits of ppo-clip, and the entropy as an input."""
        return replace(super().traits, reads=frozenset({"entropy"}))

    def __call__(self, chosen, rejected=None, step=None):
        """Return the loss [trajectories]."""
        counts = (self.step_statistic(chosen) if step is None else step)[:, 0]
        mean = AGGREGATES[self.aggregate](chosen, chosen.input("entropy"), counts)
        return super().__call__(chosen, rejected, step) - self.bonus * mean


@dataclass(frozen=True)
class SecondReference:
    """Log-probabilities under a second frozen policy."""

    policy: str
    name: ClassVar[str] = "second-reference"

    @property
    def traits(self):
        """Traits with the second policy."""
        return TokenInputTraits(policy=self.policy)


@dataclass(frozen=True)
class TwoReferences:
    """DPO against the geometric mean of two references."""

    second: str
    beta: float = 0.5
    credit: ClassVar = Uniform()

    @property
    def traits(self):
        """Traits of a loss on pairs with two references."""
        return LossTraits(
            needs_rejected=True, needs_reference=True, reads=frozenset({SecondReference(self.second)})
        )

    def __call__(self, chosen, rejected):
        """Return the loss [pairs]."""
        return -F.logsigmoid(self._reward(chosen) - self._reward(rejected))

    @torch.no_grad()
    def rewards(self, side):
        """Return the log-ratio to the mean of the references [trajectories]."""
        return self._reward(side)

    def _reward(self, side):
        mean = (side.frozen_reference() + side.input("second-reference")) / 2
        return self.beta * side.sum_by_trajectory(side.policy - mean)


@dataclass(frozen=True)
class Margin:
    """Difference of the two largest logits at a token, which log-probabilities of a single token cannot give."""

    scale: float = 1.0
    name: ClassVar[str] = "margin"
    traits: ClassVar[TokenInputTraits] = TokenInputTraits()

    def __call__(self, chunk):
        """Return the margin [tokens]."""
        largest = chunk.logits.topk(2).values
        return self.scale * (largest[:, 0] - largest[:, 1])
