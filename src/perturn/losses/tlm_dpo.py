"""tlm-DPO: DPO with turn weights from the reference's confidence, and no density-ratio estimation."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from perturn.losses.checks import check_positive
from perturn.losses.dpo import dpo_loss
from perturn.losses.logprobs import TurnLogprobs, check_pairs
from perturn.losses.reduction import weighted_sum
from perturn.losses.weights import check_weight_settings, confidence_weights, is_high_weight_turn


@dataclass(frozen=True)
class TLMDPO:
    """DPO on a weighted sum of turns, turns the reference already knows weighing less.

        L = -log sigmoid(beta * (sum_i omega_i sum_j u_ij of chosen - the same of rejected))

    Source: tlm-DRE, the ablation "w/o DRE"; weights of Eqs. 9-10 in the loss of arXiv:2305.18290, Eq. 7.
    Differs: the paper gives no formula for its ablation; this is its description written out.
    """

    needs_reference: ClassVar[bool] = True
    needs_rejected: ClassVar[bool] = True

    beta: float = 0.1
    """Inverse temperature, per nat; > 0. Larger keeps the policy nearer the reference. ETO's value."""

    pivot: float = 0.9
    """Confidence above which a turn takes the low weight, in [0, 1]."""

    low: float = 0.2
    """Weight of a turn the reference is confident of, without unit; > 0."""

    high: float = 1.0
    """Weight of any other turn, without unit; >= low."""

    def __post_init__(self) -> None:
        """Reject settings outside their range."""
        check_positive("beta", self.beta)
        check_weight_settings(pivot=self.pivot, low=self.low, high=self.high)

    def __call__(self, chosen: TurnLogprobs, rejected: TurnLogprobs) -> Tensor:
        """Return the loss, in nats [pairs]."""
        check_pairs(chosen, rejected)
        return dpo_loss(self._log_ratio(chosen), self._log_ratio(rejected), beta=self.beta)

    def turn_weights(self, side: TurnLogprobs) -> Tensor:
        """Return omega of every turn, without unit [turns]."""
        return confidence_weights(side, pivot=self.pivot, low=self.low, high=self.high)

    def rewards(self, side: TurnLogprobs) -> Tensor:
        """Return beta sum_i omega_i sum_j u_ij, without unit [trajectories]; without gradient."""
        with torch.no_grad():
            return self.beta * self._log_ratio(side)

    def diagnostics(self, chosen: TurnLogprobs, rejected: TurnLogprobs) -> dict[str, Tensor]:
        """Return, without gradient, 1 for each turn of high weight and 0 for each other [turns], by side."""
        sides = {"chosen": chosen, "rejected": rejected}
        return {
            f"high_weight_turns/{name}": is_high_weight_turn(side, pivot=self.pivot).float()
            for name, side in sides.items()
        }

    def _log_ratio(self, side: TurnLogprobs) -> Tensor:
        """Return sum_i omega_i sum_j u_ij, in nats [trajectories]."""
        return weighted_sum(side, side.log_ratio(), self.turn_weights(side))
