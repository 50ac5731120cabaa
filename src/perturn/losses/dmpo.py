"""DMPO: DPO with a discount on later turns, normalized by the number of turns."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from perturn.bounds import POSITIVE, check_bounds
from perturn.credit import TurnCredit
from perturn.credit.single_turn import Discount
from perturn.losses.dpo import dpo_loss
from perturn.losses.protocol import LossTraits
from perturn.losses.turn_logprobs import TurnLogprobs, reduced_log_ratio, reduced_log_ratios


@dataclass(frozen=True)
class DMPO:
    """DPO on a weighted sum over turns, in which earlier turns weigh more.

        L = -log sigmoid(beta * (U_chosen - U_rejected)),   U = sum_t phi(t, T) u_t,   u_t = sum_j u_tj

    Source: DMPO (Shi et al. 2024, "Direct Multi-Turn Preference Optimization for Language Agents"), Eq. 16.
    Differs: phi has the factor gamma^t of Eqs. 14-15, which Eq. 16 lacks, unless `discount` is printed. T is the number
    of turns of a side after truncation. The end-of-turn token has the discount of its turn.
    """

    traits: ClassVar[LossTraits] = LossTraits(needs_rejected=True, needs_reference=True)

    beta: Annotated[float, POSITIVE] = 0.1
    """Inverse temperature, per nat; > 0. A larger value keeps the policy closer to the reference."""

    gamma: float = 0.7
    """Discount from one turn to the next, in [0, 1]. At 1 phi falls linearly with t. At 0 `derived` weighs the first
    turn alone."""

    discount: str = "derived"
    """Formula of phi. derived: from Eqs. 14-15. printed: Eq. 16 as printed, without gamma^t."""

    def __post_init__(self) -> None:
        """Reject settings outside their range."""
        check_bounds(self)
        self.credit  # noqa: B018  checks its settings

    def __call__(self, chosen: TurnLogprobs, rejected: TurnLogprobs) -> Tensor:
        """Return the loss, in nats [pairs]."""
        return dpo_loss(*reduced_log_ratios(chosen, rejected, self.credit), beta=self.beta)

    @property
    def credit(self) -> TurnCredit:
        """Discount of the paper, as a credit."""
        return Discount(gamma=self.gamma, discount=self.discount)

    @torch.no_grad()
    def rewards(self, side: TurnLogprobs) -> Tensor:
        """Return beta sum_t phi(t, T) u_t, without unit [trajectories]; without gradient."""
        return self.beta * reduced_log_ratio(side, self.credit)
