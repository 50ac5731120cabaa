"""W-DPO: DPO in which a pair weighs by how much better the process of its chosen side was."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from perturn.bounds import POSITIVE, Bound, bounded
from perturn.credit import Credit
from perturn.credit.process_score import ProcessScore
from perturn.credit.single_turn import Uniform
from perturn.losses.dpo import dpo_loss
from perturn.losses.protocol import LossTraits
from perturn.losses.turn_logprobs import TurnLogprobs, reduced_log_ratio, reduced_log_ratios, turn_weights


def gap_weights(score_chosen: Tensor, score_rejected: Tensor, *, base: float) -> Tensor:
    """Weigh each pair by the gap between the process scores of its sides.

        w = max(0, base + s_chosen - s_rejected)

    Source: StepORLM (Zhou et al. 2025), arXiv:2509.22558, which weighs each pair of DPO by the process scores of its
    sides; its abstract and its reviews were read, and no formula.
    Differs: the form is Perturn's. It reads the two sides alone, so that no other pair of a batch moves it.

    Args:
        score_chosen: s of the chosen trajectory, without unit [pairs].
        score_rejected: s of the rejected trajectory, without unit [pairs].
        base: Weight at equal scores, without unit.

    Returns:
        Weights, without unit, >= 0 [pairs].
    """
    return (base + score_chosen - score_rejected).clamp(min=0)


@dataclass(frozen=True)
@bounded
class WDPO:
    """DPO with a weight for each pair: how much higher the turns of the chosen side score than the rejected side's.

        L = -w log sigmoid(beta * (u_chosen - u_rejected)),   w = max(0, base + s_chosen - s_rejected)

    s is the mean over turns of the numbers that the credit wrote.

    The number of a turn says how good the turn was. It does not weigh the log-ratios.

    Source: StepORLM (Zhou et al. 2025), arXiv:2509.22558, on the loss of arXiv:2305.18290, Eq. 7.
    Differs: see `gap_weights`; a credit computes the scores, where the paper uses a generative process reward model.
    """

    traits: ClassVar[LossTraits] = LossTraits(needs_rejected=True, needs_reference=True, diagnostics=True)
    credit: ClassVar[Credit] = ProcessScore()

    beta: Annotated[float, POSITIVE] = 0.1
    """Inverse temperature, per nat; > 0. A larger value keeps the policy closer to the reference."""

    base: Annotated[float, Bound(least=0, most=1e6)] = 1.0
    """Weight of a pair whose sides have equal scores, without unit; >= 0. 0: the gap alone decides, and such a pair
    has no effect."""

    def __call__(self, chosen: TurnLogprobs, rejected: TurnLogprobs) -> Tensor:
        """Return the loss, in nats [pairs]."""
        log_ratios = reduced_log_ratios(_unweighed(chosen), _unweighed(rejected), Uniform())
        return self._pair_weight(chosen, rejected) * dpo_loss(*log_ratios, beta=self.beta)

    @torch.no_grad()
    def rewards(self, side: TurnLogprobs) -> Tensor:
        """Return beta u, without unit [trajectories]; without gradient."""
        return self.beta * reduced_log_ratio(_unweighed(side), Uniform())

    def diagnostics(self, chosen: TurnLogprobs, rejected: TurnLogprobs) -> dict[str, Tensor]:
        """Return `pair_weight`, w of each pair, without unit [pairs]; without gradient."""
        return {"pair_weight": self._pair_weight(chosen, rejected)}

    def _pair_weight(self, chosen: TurnLogprobs, rejected: TurnLogprobs) -> Tensor:
        scores = (side.mean_over_turns(turn_weights(side, self.credit)) for side in (chosen, rejected))
        return gap_weights(*scores, base=self.base)


def _unweighed(side: TurnLogprobs) -> TurnLogprobs:
    """Return the side without its numbers, which are scores here."""
    return replace(side, weight=None)
