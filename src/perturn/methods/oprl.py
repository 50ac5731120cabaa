"""OPRL: the outcome, plus an implicit reward of each turn from a reward model trained in each iteration."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Annotated, Any

from torch import Tensor

from perturn.extend import MODEL, NOT_NEGATIVE, Bound, Needs, OneOf, Progress, Trajectory
from perturn.extend.tensors import (
    LOG_RATIO_REDUCTIONS,
    Deviation,
    GroupCredit,
    Logprobs,
    Normalization,
    Numbers,
    episode_advantages,
    normalized_progress,
    on_each_turn,
    returns_to_go,
    turn_log_ratios,
    weigh_tasks_with,
)


@dataclass(frozen=True)
class OPRL(GroupCredit):
    """GRPO's advantage, plus an implicit reward of the turn from a reward model that is trained in each iteration.

        A_it = (S_i - mean(S)) / (std(S) + 1e-6) + alpha sum_(k >= t) step_gamma^(k - t) z_ik
        z_it = (r_it - mean(r)) / (std(r) + 1e-6),   r_it = sum_j log pi_prm(y_itj) - log pi_ref(y_itj)

    mean(r) and std(r) are over the turns of the group. The recipe's section `reward` trains pi_prm in each iteration,
    and also defines pi_ref.

    Source: Liu et al. 2025, "Online Process Reward Learning for Agentic Reinforcement Learning", arXiv:2509.19199, by
    its abstract. The step-level advantages follow summaries of the paper by other authors.

    Differs: r has no factor beta, since division by the standard deviation removes it. With `normalize` mean, multiply
    alpha by beta. step_gamma is Perturn's addition. At 1 the implicit rewards are summed to the end, as shaping rewards
    are in the paper. At 0 each step has its own reward alone, as the paper's step advantage seems to have. A FAILED
    trajectory has no implicit rewards, and counts with score 0. A trajectory alone in its group gets 0.
    """

    alpha: Annotated[float, NOT_NEGATIVE] = 1.0
    """Weight of the implicit rewards relative to the outcome, without unit; >= 0. At 0 the credit equals `grpo`."""

    step_gamma: Annotated[float, Bound(least=0, most=1)] = 0.0
    """Discount of the implicit rewards of later turns, in [0, 1]. At 0 only the turn's own implicit reward counts."""

    reduction: Annotated[str, OneOf(LOG_RATIO_REDUCTIONS)] = "sum"
    """Reduction of a turn's log-ratios to r: sum over its tokens; or mean, which does not depend on the length."""

    normalize: Normalization = "std"
    """Normalization of scores and implicit rewards. mean: subtract the mean. std: then divide by the standard deviation
    too."""

    std: Deviation = "sample"
    """Standard deviation: sample (over n - 1), or population."""

    checkpoint: Annotated[str | None, MODEL] = None
    """Policy pi_prm: the name of a policy of the run, a folder, or a Hub id. It must have the vocabulary of the run's
    model. None: the reward model of the iteration."""

    @property
    def needs(self) -> Needs:
        """See `Credit.needs`."""
        return (
            "reference",
            Progress(self.checkpoint, reward_model=self.checkpoint is None),
        )

    def __call__(
        self,
        group: Sequence[Trajectory],
        *,
        progress: Logprobs | None = None,
        reference: Logprobs | None = None,
        **_: Any,
    ) -> list[Tensor]:
        """Return the advantage of every turn, one tensor per trajectory [turns].

        Raises:
            ValueError: If `progress` or `reference` is None, not finite, or not of the group's shape.
        """
        ratios = turn_log_ratios(group, progress, reference, self.reduction)
        return weigh_tasks_with(group, self.returns(group), ratios, self._fuse)

    def _fuse(self, rewards: Numbers, ratios: Numbers) -> Numbers:
        scores = [fsum(of_one) for of_one in rewards]
        outcome = episode_advantages(
            scores,
            on_each_turn(scores, rewards),
            normalize=self.normalize,
            statistics="trajectories",
            std=self.std,
        )
        steps = [
            returns_to_go(of_one, self.step_gamma)
            for of_one in normalized_progress(ratios, self.normalize, self.std)
        ]
        return [
            [own + self.alpha * its for own, its in zip(*both, strict=True)]
            for both in zip(outcome, steps, strict=True)
        ]
