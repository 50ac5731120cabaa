"""DMPO: DPO with a discount on later turns, normalized by the number of turns."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from perturn.losses.checks import check_choice, check_positive, check_unit_interval
from perturn.losses.dpo import dpo_loss
from perturn.losses.logprobs import TurnLogprobs, check_pairs
from perturn.losses.reduction import weighted_sum


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

    Args:
        position: t, from 0 [turns], floating point; the result has its dtype.
        turns: T of the trajectory each turn belongs to [turns], floating point.
        gamma: Discount, in [0, 1].

    Returns:
        Discount, without unit, in [0, 1] [turns].
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
class DMPO:
    """DPO on a weighted sum of turns, earlier turns weighing more.

        L = -log sigmoid(beta * (sum_t phi(t, T) u_t of chosen - the same of rejected)),   u_t = sum_j u_tj

    Source: DMPO (Shi et al. 2024, "Direct Multi-Turn Preference Optimization for Language Agents"), Eq. 16.
    Differs: phi regains the factor gamma^t that Eqs. 14-15 give it, unless `discount` is printed. T counts
    the turns of the sequence as given, after truncation, for each side by itself. The end-of-turn token
    carries its turn's discount.
    """

    needs_reference: ClassVar[bool] = True
    needs_rejected: ClassVar[bool] = True

    beta: float = 0.1
    """Inverse temperature, per nat; > 0. Larger keeps the policy nearer the reference."""

    gamma: float = 0.7
    """Discount from one turn to the next, in [0, 1]. 0: the first turn alone (`derived`); 1: linear."""

    discount: str = "derived"
    """derived: phi as Eqs. 14-15 give it. printed: phi as Eq. 16 prints it, without gamma^t."""

    def __post_init__(self) -> None:
        """Reject settings outside their range."""
        check_positive("beta", self.beta)
        check_unit_interval("gamma", self.gamma)
        check_choice("discount", self.discount, DISCOUNTS)

    def __call__(self, chosen: TurnLogprobs, rejected: TurnLogprobs) -> Tensor:
        """Return the loss, in nats [pairs]."""
        check_pairs(chosen, rejected)
        return dpo_loss(self._log_ratio(chosen), self._log_ratio(rejected), beta=self.beta)

    def turn_weights(self, side: TurnLogprobs) -> Tensor:
        """Return phi(t, T) of every turn, without unit [turns]."""
        dtype = torch.float64 if side.policy.dtype == torch.float64 else torch.float32
        position = side.turn_position.to(dtype)
        turns = side.turns_per_trajectory[side.turn_trajectory].to(dtype)
        return DISCOUNTS[self.discount](position, turns, gamma=self.gamma)

    def rewards(self, side: TurnLogprobs) -> Tensor:
        """Return beta sum_t phi(t, T) u_t, without unit [trajectories]; without gradient."""
        with torch.no_grad():
            return self.beta * self._log_ratio(side)

    def _log_ratio(self, side: TurnLogprobs) -> Tensor:
        """Return sum_t phi(t, T) u_t, in nats [trajectories]."""
        return weighted_sum(side, side.log_ratio(), self.turn_weights(side))
