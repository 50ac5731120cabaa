"""Direct preference optimization (DPO) on whole trajectories, as in ETO."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from perturn.bounds import NOT_NEGATIVE, POSITIVE, OneOf, bounded
from perturn.credit import TurnCredit
from perturn.credit.single_turn import Uniform
from perturn.losses.protocol import LossTraits
from perturn.losses.turn_logprobs import (
    REDUCTIONS,
    TurnLogprobs,
    reduced_log_ratio,
    reduced_log_ratios,
    turn_weights,
)


def dpo_loss(log_ratio_chosen: Tensor, log_ratio_rejected: Tensor, *, beta: float) -> Tensor:
    """Return the logistic loss on the margin between two implicit rewards.

        L = -log sigmoid(beta * (u_chosen - u_rejected)),   u = log pi(y|x) - log pi_ref(y|x)

    Source: Rafailov et al. 2023, "Direct Preference Optimization", arXiv:2305.18290, Eq. 7.
    Differs: one value per pair; the trainer averages.

    Args:
        log_ratio_chosen: u of the chosen trajectory, in nats [pairs].
        log_ratio_rejected: u of the rejected trajectory, in nats [pairs].
        beta: Inverse temperature, per nat. A larger value keeps the policy closer to the reference.

    Returns:
        Loss, in nats [pairs].
    """
    return -F.logsigmoid(beta * (log_ratio_chosen - log_ratio_rejected))


@dataclass(frozen=True)
@bounded
class DPO:
    """DPO on whole episodes: the log-ratios of all turns are summed, and the sums of the two sides are compared.

        L = -log sigmoid(beta * (u_chosen - u_rejected)) - sft * log pi(chosen)

    Source: Rafailov et al. 2023, arXiv:2305.18290, Eq. 7; on trajectories, Song et al. 2024 (ETO), arXiv:2403.02502;
    with `sft` 1, Xiong et al. 2024 (IPR), arXiv:2406.11176.
    Differs: nothing with `reduction` sum. The reductions token_mean and turn_mean, of both terms, are Perturn's
    additions.
    """

    traits: ClassVar[LossTraits] = LossTraits(needs_rejected=True, needs_reference=True)
    credit: ClassVar[TurnCredit] = Uniform()

    beta: Annotated[float, POSITIVE] = 0.1
    """Inverse temperature, per nat; > 0. A larger value keeps the policy closer to the reference."""

    reduction: Annotated[str, OneOf(tuple(REDUCTIONS))] = "sum"
    """Reduction of a trajectory's log-ratios to one number: sum, token_mean or turn_mean. A mean needs a larger
    beta."""

    sft: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the negative log-likelihood of the chosen side, without unit; >= 0. `reduction` also applies to this
    term. IPR uses 1 with sum."""

    def __call__(self, chosen: TurnLogprobs, rejected: TurnLogprobs) -> Tensor:
        """Return the loss, in nats [pairs]."""
        log_ratios = reduced_log_ratios(chosen, rejected, self.credit, self.reduction)
        loss = dpo_loss(*log_ratios, beta=self.beta)
        if not self.sft:
            return loss
        weights = turn_weights(chosen, self.credit)
        return loss - self.sft * REDUCTIONS[self.reduction](chosen, chosen.policy, weights)

    @torch.no_grad()
    def rewards(self, side: TurnLogprobs) -> Tensor:
        """Return beta u, without unit [trajectories]; without gradient."""
        return self.beta * reduced_log_ratio(side, self.credit, self.reduction)
