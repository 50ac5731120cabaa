"""Oracle weights: turn weights from the true first wrong turn, instead of the reference's confidence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from perturn.extend import POSITIVE, SENSES, Distance, Needs, OneOf, Trajectory, check_bounds, wrong_turns
from perturn.extend.tensors import CreditTraits

TURNS = ("from", "only")
"""Turns with the high weight in an episode with an error: all turns from the first wrong turn on, or only wrong
turns."""


def first_error_weights(wrong: Tensor, *, turns: str, low: float, high: float) -> Tensor:
    """Return a low weight for each turn before the first wrong turn, and a high weight for the other turns.

        omega_t = high if t >= first else low,   first = min {t: remaining_t >= remaining_(t-1)}

    If `turns` is `only`, right turns after the first wrong turn also get the low weight. An episode without a wrong
    turn gets the high weight at every turn.

    Source: ours. The paper's Eq. 10 (tlm-DRE) finds decisive turns by `p_i <= pivot`; here the true wrong turn replaces
        this test. So the credit bounds the gain from a better estimate of these turns.
    Differs: the paper does not know which turns are wrong.

    Args:
        wrong: Whether each turn of one trajectory came no closer to success, as booleans [turns].
        turns: One of TURNS.
        low: Weight of a right turn, without unit.
        high: Weight of any other turn, without unit.

    Returns:
        Weights, without unit, float32 [turns].
    """
    decides = wrong.cumsum(0) > 0 if turns == "from" else wrong
    decides = decides | ~wrong.any()
    return torch.full(wrong.shape, low, dtype=torch.float32).masked_fill(decides, high)


@dataclass(frozen=True)
class FirstError:
    """Low weight before the first wrong turn, high weight from this turn on. The environment knows the wrong turns.

    A turn is wrong if the distance to a success is no smaller after it. If no turn is wrong, all weights are high.
    See `first_error_weights`.

    Source: Perturn, an oracle for tlm-DRE's Eq. 10.
    Differs: the paper does not know which turns are wrong.
    """

    traits: ClassVar[CreditTraits] = CreditTraits(weighs_sides=True)

    turns: Annotated[str, OneOf(TURNS)] = "from"
    """Turns that get the high weight. from: all turns from the first wrong turn on. only: wrong turns alone."""

    low: Annotated[float, POSITIVE] = 0.2
    """Weight of a turn before the first wrong turn, without unit; > 0. The default is the same as in `confidence`."""

    high: Annotated[float, POSITIVE] = 1.0
    """Weight of any other turn, without unit; >= low."""

    distance: Annotated[str, OneOf(SENSES)] = "shortest"
    """Measure of the distance to a success. shortest: the shortest path, with full knowledge of the environment.
    searching: the path of the environment's expert, who knows only what the episode has shown."""

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
