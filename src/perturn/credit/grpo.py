"""GRPO: normalize a trajectory's score by the mean and standard deviation of its group."""

from collections.abc import Sequence
from dataclasses import dataclass

from perturn.credit.group_statistics import (
    Deviation,
    GroupCredit,
    Normalization,
    Singleton,
    Unit,
    episode_advantages,
    on_each_turn,
)
from perturn.credit.protocol import CreditTraits
from perturn.credit.returns import Numbers
from perturn.types import Trajectory


@dataclass(frozen=True)
class GRPO(GroupCredit):
    """Score of the episode minus the mean of its group, divided by the standard deviation of the group.

        A_it = (S_i - mean(S)) / (std(S) + 1e-6),   S_i = sum_t r_it

    Source: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, Section 4.1.2.
    Differs: one number per turn. With `normalize` mean the credit only subtracts the group mean, which is unbiased up
    to a factor of (N - 1) / N. Division by the deviation weighs tasks and branches by their difficulty. `statistics`
    steps runs the statistics over turns, as verl-agent does. A trajectory alone in its group gets 0, unless
    `singleton` is raw.
    """

    normalize: Normalization = "std"
    """std (as in the paper): subtract the mean and divide by the standard deviation. mean: only subtract the mean."""

    statistics: Unit = "trajectories"
    """Unit of the statistics. trajectories: each trajectory counts once. steps: each turn counts once, so long
    trajectories weigh more, which is biased."""

    std: Deviation = "sample"
    """Standard deviation: sample (over n - 1), or population."""

    singleton: Singleton = "zero"
    """Advantage of a trajectory alone in its group: zero, or raw (its score, as in verl)."""

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        unbiased = self.normalize == "mean" and self.statistics == "trajectories"
        return CreditTraits(needs_group=True, weighs_alone=self.singleton == "raw", unbiased=unbiased)

    def _weigh(self, group: Sequence[Trajectory], rewards: Numbers) -> Numbers:
        scores = [sum(of_one) for of_one in rewards]
        return episode_advantages(
            scores,
            on_each_turn(scores, rewards),
            normalize=self.normalize,
            statistics=self.statistics,
            std=self.std,
            singleton=self.singleton,
        )
