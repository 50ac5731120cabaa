"""W-DPO: DPO in which a pair weighs more if the process score of its chosen side is higher."""

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
    """Return the weight of each pair from the gap between the process scores of its two sides.

        w = max(0, base + s_chosen - s_rejected)

    Source: StepORLM (Zhou et al. 2025), arXiv:2509.22558, which weighs each pair of DPO by the process scores of its
    sides. Only the abstract and the reviews were read, which have no formula.
    Differs: the formula is Perturn's. It depends on the two sides alone, and not on other pairs of a batch.

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
    """DPO with a weight for each pair, which grows with the gap between the scores of its two sides.

        L = -w log sigmoid(beta * (u_chosen - u_rejected)),   w = max(0, base + s_chosen - s_rejected)

    s is the mean score of the turns of a side. The credit computes the score of each turn. The scores do not weigh the
    log-ratios of the turns.

    Source: StepORLM (Zhou et al. 2025), arXiv:2509.22558, on the loss of arXiv:2305.18290, Eq. 7.
    Differs: see `gap_weights`. A credit computes the scores; the paper uses a generative process reward model.
    """

    traits: ClassVar[LossTraits] = LossTraits(needs_rejected=True, needs_reference=True, diagnostics=True)
    credit: ClassVar[Credit] = ProcessScore()

    beta: Annotated[float, POSITIVE] = 0.1
    """Inverse temperature, per nat; > 0. A larger value keeps the policy closer to the reference."""

    base: Annotated[float, Bound(least=0, most=1e6)] = 1.0
    """Weight of a pair whose sides have equal scores, without unit; >= 0. At 0 such a pair has no effect."""

    def __call__(self, chosen: TurnLogprobs, rejected: TurnLogprobs) -> Tensor:
        """Return the loss, in nats [pairs]."""
        log_ratios = reduced_log_ratios(_unweighed(chosen), _unweighed(rejected), Uniform())
        return self._pair_weight(chosen, rejected) * dpo_loss(*log_ratios, beta=self.beta)

    @torch.no_grad()
    def rewards(self, side: TurnLogprobs) -> Tensor:
        """Return beta u, without unit [trajectories]; without gradient."""
        return self.beta * reduced_log_ratio(_unweighed(side), Uniform())

    def diagnostics(self, chosen: TurnLogprobs, rejected: TurnLogprobs) -> dict[str, Tensor]:
        """Return `pair_weight`: w of each pair, without unit and without gradient [pairs]."""
        return {"pair_weight": self._pair_weight(chosen, rejected)}

    def _pair_weight(self, chosen: TurnLogprobs, rejected: TurnLogprobs) -> Tensor:
        scores = (side.mean_over_turns(turn_weights(side, self.credit)) for side in (chosen, rejected))
        return gap_weights(*scores, base=self.base)


def _unweighed(side: TurnLogprobs) -> TurnLogprobs:
    """Return the side without its weights, which are scores here."""
    return replace(side, weight=None)
