"""Supervised fine-tuning on the chosen trajectories."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from perturn.credit import TurnCredit
from perturn.credit.single_turn import Uniform
from perturn.losses.protocol import LossTraits
from perturn.losses.turn_logprobs import TurnLogprobs, turn_weights


@dataclass(frozen=True)
class SFT:
    """Mean negative log-likelihood of the tokens of an episode, each multiplied by the weight of its turn.

        L = -(1/n) sum_i w_i sum_j log pi(y_ij)

    Source: behavioral cloning, as in tlm-DRE, Section 5.1, and DMPO, Eq. 7.
    Differs: one mean per trajectory, so a short trajectory weighs as much as a long trajectory. The papers' trainers
    average over the tokens of the whole batch, and have no weights (w = 1).
    """

    traits: ClassVar[LossTraits] = LossTraits()
    credit: ClassVar[TurnCredit] = Uniform()

    def __call__(self, chosen: TurnLogprobs, rejected: TurnLogprobs | None = None) -> Tensor:
        """Return the loss, in nats per token [trajectories]; the rejected side is ignored."""
        weight = turn_weights(chosen, self.credit)
        return -chosen.mean_by_trajectory(weight[chosen.turn_index] * chosen.policy)

    @torch.no_grad()
    def rewards(self, side: TurnLogprobs) -> Tensor:
        """Return the mean log-probability of a token, in nats [trajectories]; without gradient."""
        return side.mean_by_trajectory(side.policy)
