"""The oracle: weights from the true first wrong turn, instead of the reference's confidence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from perturn.extend import POSITIVE, SENSES, Distance, Needs, OneOf, Trajectory, check_bounds, wrong_turns
from perturn.extend.tensors import CreditTraits

TURNS = ("from", "only")
"""Turns of an episode with an error that take the high weight: those from the first wrong one on, or the wrong ones."""


def first_error_weights(wrong: Tensor, *, turns: str, low: float, high: float) -> Tensor:
    """Weigh the turns before the first wrong one lower than the others.

        omega_t = high if t >= first else low,   first = min {t: remaining_t >= remaining_(t-1)}

    `only` weighs every right turn low, those after the first wrong one too. An episode without a wrong turn
    gets the high weight at every turn.

    Source: ours. It is tlm-DRE's Eq. 10 with the true wrong turn instead of `p_i <= pivot`, which the paper uses to
        find deciding turns. So it bounds the gain of a better guess of these turns.
    Differs: the paper has no such knowledge.

    Args:
        wrong: Whether each turn of one trajectory brought the success no nearer [turns].
        turns: `from` or `only`.
        low: Weight of a turn that was right, without unit.
        high: Weight of any other, without unit.

    Returns:
        Weights, without unit, float32 [turns].
    """
    decides = wrong.cumsum(0) > 0 if turns == "from" else wrong
    decides = decides | ~wrong.any()
    return torch.full(wrong.shape, low, dtype=torch.float32).masked_fill(decides, high)


@dataclass(frozen=True)
class FirstError:
    """Low weight before the first wrong turn, high weight from it on. The environment says which turn is wrong.

    A turn is wrong if the distance to a success is no smaller after it. If no turn is wrong, all weights are high.
    See `first_error_weights`.

    Source: Perturn, an oracle for tlm-DRE's Eq. 10.
    Differs: the paper has no such knowledge.
    """

    traits: ClassVar[CreditTraits] = CreditTraits()

    turns: Annotated[str, OneOf(TURNS)] = "from"
    """Turns that take the high weight: from the first wrong one on, or only the wrong ones."""

    low: Annotated[float, POSITIVE] = 0.2
    """Weight of a turn before the first error, without unit; > 0. As in `confidence`."""

    high: Annotated[float, POSITIVE] = 1.0
    """Weight of any other turn, without unit; >= low."""

    distance: Annotated[str, OneOf(SENSES)] = "shortest"
    """How the distance to a success is measured: `shortest`, with full knowledge of the world, or `searching`, by the
    environment's expert, who knows only what the episode has shown."""

    def __post_init__(self) -> None:
        """Reject settings outside their range."""
        check_bounds(self)
        if self.high < self.low:
            raise ValueError(f"high must be >= low, got high {self.high} and low {self.low}.")

    @property
    def needs(self) -> Needs:
        """See `Credit.needs`."""
        return (Distance(self.distance),)

    def __call__(self, group: Sequence[Trajectory], **_: Any) -> list[Tensor]:
        """Return the weight of every turn, one tensor per trajectory, without unit [turns].

        Raises:
            DataError: If the remaining path of a turn was not measured.
        """
        wrong = (torch.tensor(wrong_turns(one), dtype=torch.bool) for one in group)
        return [first_error_weights(one, turns=self.turns, low=self.low, high=self.high) for one in wrong]
