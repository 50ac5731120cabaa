"""tlm-DPO: DPO with turn weights from the reference's confidence, without density-ratio estimation."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from perturn.bounds import POSITIVE, check_bounds
from perturn.credit import TurnCredit
from perturn.credit.single_turn import Confidence
from perturn.losses.dpo import dpo_loss
from perturn.losses.protocol import LossTraits
from perturn.losses.turn_logprobs import TurnLogprobs, reduced_log_ratio, reduced_log_ratios


@dataclass(frozen=True)
class TLMDPO:
    """DPO on a weighted sum over turns, in which turns that the reference is confident about weigh less.

        L = -log sigmoid(beta * (U_chosen - U_rejected)),   U = sum_i omega_i sum_j u_ij

    Source: tlm-DRE, the ablation "w/o DRE"; weights of Eqs. 9-10 in the loss of arXiv:2305.18290, Eq. 7.
    Differs: the paper describes its ablation in words; this formula follows the description.
    """

    traits: ClassVar[LossTraits] = LossTraits(needs_rejected=True, needs_reference=True)

    beta: Annotated[float, POSITIVE] = 0.1
    """Inverse temperature, per nat; > 0. A larger value keeps the policy closer to the reference. ETO uses 0.1."""

    pivot: float = 0.9
    """Confidence above which a turn gets the low weight, in [0, 1]."""

    low: float = 0.2
    """Weight of a turn that the reference is confident about, without unit; > 0."""

    high: float = 1.0
    """Weight of any other turn, without unit; >= low."""

    def __post_init__(self) -> None:
        """Reject settings outside their range."""
        check_bounds(self)
        self.credit  # noqa: B018  checks its settings

    def __call__(self, chosen: TurnLogprobs, rejected: TurnLogprobs) -> Tensor:
        """Return the loss, in nats [pairs]."""
        return dpo_loss(*reduced_log_ratios(chosen, rejected, self.credit), beta=self.beta)

    @property
    def credit(self) -> TurnCredit:
        """Turn weights of the paper, as a credit."""
        return Confidence(pivot=self.pivot, low=self.low, high=self.high)

    @torch.no_grad()
    def rewards(self, side: TurnLogprobs) -> Tensor:
        """Return beta sum_i omega_i sum_j u_ij, without unit [trajectories]; without gradient."""
        return self.beta * reduced_log_ratio(side, self.credit)
