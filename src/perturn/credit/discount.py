"""Discount credit: earlier turns count for more, normalized by the number of turns."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from perturn.checks import check_choice, check_unit_interval
from perturn.credit.protocol import weigh_group
from perturn.types import Trajectory


def derived_discount(position: Tensor, turns: Tensor, *, gamma: float) -> Tensor:
    """Discount of turn t of T, as it follows from the occupancy measure.

        phi(t, T) = gamma^t (1 - gamma^(T - t)) / (1 - gamma^T)

    Source: DMPO (Shi et al. 2024), Eqs. 14-15 and Corollary 4.0.2.
    Differs: the printed Eq. 16 lost the factor gamma^t; see printed_discount. Exact limits: gamma = 0 leaves
    the first turn alone, gamma = 1 gives (T - t) / T.

    Args:
        position: t, from 0 [turns], floating point; the result has its dtype.
        turns: T of the trajectory each turn belongs to [turns], floating point.
        gamma: Discount, in [0, 1].

    Returns:
        Discount, without unit, in [0, 1] [turns].
    """
    if gamma == 0:
        return (position == 0).to(position.dtype)
    return torch.exp(position * math.log(gamma)) * printed_discount(position, turns, gamma=gamma)


def printed_discount(position: Tensor, turns: Tensor, *, gamma: float) -> Tensor:
    """Discount of turn t of T, as the paper prints it.

        phi(t, T) = (1 - gamma^(T - t)) / (1 - gamma^T)

    Source: DMPO (Shi et al. 2024), Eq. 16.
    Differs: nothing. Contradicts Corollary 4.0.2 of the paper: gamma = 0 gives 1 for every turn. gamma = 1 is
    the exact limit (T - t) / T.

    Args and Returns: as of derived_discount.
    """
    if gamma == 0:
        return torch.ones_like(position)
    if gamma == 1:
        return (turns - position) / turns
    # 1 - gamma^k as -expm1(k log gamma): keeps its digits when gamma is near 1.
    log_gamma = math.log(gamma)
    return torch.expm1((turns - position) * log_gamma) / torch.expm1(turns * log_gamma)


DISCOUNTS: dict[str, Callable[..., Tensor]] = {"derived": derived_discount, "printed": printed_discount}
"""Discount by name."""


@dataclass(frozen=True)
class Discount:
    """The discount phi(t, T) of DMPO: `derived_discount`, or `printed_discount`."""

    needs: ClassVar[frozenset[str]] = frozenset()

    gamma: float = 0.7
    """Discount from one turn to the next, in [0, 1]. 0: the first turn alone (`derived`); 1: linear."""

    discount: str = "derived"
    """derived: phi as Eqs. 14-15 give it. printed: phi as Eq. 16 prints it, without gamma^t."""

    def __post_init__(self) -> None:
        """Reject settings outside their range."""
        check_unit_interval("gamma", self.gamma)
        check_choice("discount", self.discount, DISCOUNTS)

    def __call__(self, group: Sequence[Trajectory], **_: Any) -> list[Tensor]:
        """Return phi(t, T) of every turn, one tensor a trajectory, without unit [turns]."""
        return weigh_group(self, group)

    def weigh(self, position: Tensor, turns: Tensor, confidence: Tensor | None = None) -> Tensor:
        """Return phi(t, T) of every turn, without unit [turns]."""
        return DISCOUNTS[self.discount](position, turns, gamma=self.gamma)
