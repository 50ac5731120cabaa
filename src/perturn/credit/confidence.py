"""Confidence credit: turns that the reference policy already knows count for less."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from perturn.checks import check_positive, check_unit_interval
from perturn.credit.protocol import weigh_group
from perturn.types import Trajectory


def confidence_weights(confidence: Tensor, *, pivot: float, low: float, high: float) -> Tensor:
    """Weigh turns of which the reference is confident lower than the others.

        omega_i = low  if p_i > pivot else high,   p_i = exp(mean_j log pi_ref(y_ij))

    Source: tlm-DRE ("turn-level multiscale density ratio estimation"), Eqs. 9-10.
    Differs: nothing. Read from the reference, never from the policy; carries no gradient.

    Args:
        confidence: p, in (0, 1] [turns].
        pivot: Confidence up to which a turn takes the high weight, in [0, 1].
        low: Weight of a confident turn, without unit.
        high: Weight of any other turn, without unit.

    Returns:
        Weights, without unit [turns].
    """
    return torch.full_like(confidence, low).masked_fill(confidence <= pivot, high)


@dataclass(frozen=True)
class Confidence:
    """A low weight for turns of which the reference is confident, a high one for the others: `confidence_weights`."""

    needs: ClassVar[frozenset[str]] = frozenset({"reference"})

    pivot: float = 0.9
    """Confidence above which a turn takes the low weight, in [0, 1]."""

    low: float = 0.2
    """Weight of a turn the reference is confident of, without unit; > 0."""

    high: float = 1.0
    """Weight of any other turn, without unit; >= low."""

    def __post_init__(self) -> None:
        """Reject settings outside their range."""
        check_unit_interval("pivot", self.pivot)
        check_positive("low", self.low)
        check_positive("high", self.high)
        if self.high < self.low:
            raise ValueError(f"high must be >= low, got high {self.high} and low {self.low}.")

    def __call__(
        self, group: Sequence[Trajectory], *, reference: Sequence[Sequence[Tensor]] | None = None, **_: Any
    ) -> list[Tensor]:
        """Return the weight of every turn, one tensor a trajectory, without unit [turns]; see `weigh_group`."""
        return weigh_group(self, group, reference)

    def weigh(self, position: Tensor, turns: Tensor, confidence: Tensor | None) -> Tensor:
        """Return omega of every turn, without unit [turns]."""
        assert confidence is not None
        return confidence_weights(confidence, pivot=self.pivot, low=self.low, high=self.high)
