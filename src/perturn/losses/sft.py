"""Supervised fine-tuning on the chosen trajectories."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from perturn.losses.logprobs import TurnLogprobs
from perturn.losses.weights import uniform_weights


def sft_loss(chosen: TurnLogprobs) -> Tensor:
    """Mean negative log-likelihood of the tokens of a trajectory.

        L = -(1/n) sum_i sum_j log pi(y_ij)

    Source: behavioral cloning, as in tlm-DRE, Section 5.1, and DMPO, Eq. 7.
    Differs: a mean for each trajectory, so a short trajectory weighs as much as a long one. The trainers
    of the papers average over the tokens of the whole batch.

    Args:
        chosen: The trajectories to imitate.

    Returns:
        Loss, in nats per token [trajectories].
    """
    return -chosen.mean_by_trajectory(chosen.policy)


@dataclass(frozen=True)
class SFT:
    """Negative log-likelihood per token of the chosen trajectories; the rejected side is ignored."""

    needs_reference: ClassVar[bool] = False
    needs_rejected: ClassVar[bool] = False

    def __call__(self, chosen: TurnLogprobs, rejected: TurnLogprobs | None = None) -> Tensor:
        """Return the loss, in nats per token [trajectories]."""
        return sft_loss(chosen)

    def turn_weights(self, side: TurnLogprobs) -> Tensor:
        """Return 1 for every turn, without unit [turns]."""
        return uniform_weights(side)

    def rewards(self, side: TurnLogprobs) -> Tensor:
        """Return the mean log-probability of a token, in nats [trajectories]; without gradient."""
        with torch.no_grad():
            return side.mean_by_trajectory(side.policy)
