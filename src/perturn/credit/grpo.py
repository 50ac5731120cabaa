"""GRPO: a trajectory's score against those of its group."""

from collections.abc import Sequence
from dataclasses import dataclass

from perturn.credit.group import GroupCredit, episode_advantages
from perturn.credit.returns import Numbers
from perturn.types import Trajectory


@dataclass(frozen=True)
class GRPO(GroupCredit):
    """Score of the episode minus the mean of its group, divided by the standard deviation of the group.

        A_it = (S_i - mean(S)) / (std(S) + 1e-6),   S_i = sum_t r_it

    Source: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, Section 4.1.2.
    Differs: a number per turn. `normalize` mean is the group mean alone, which is unbiased but for the factor
    (N - 1) / N; division by the deviation weighs tasks and branches by their difficulty. `statistics` steps is peers'
    code over step rows. A trajectory alone in its group gets 0, unless `singleton` is raw.
    """

    normalize: str = "std"
    """std (the paper's), or mean."""

    statistics: str = "trajectories"
    """trajectories; or steps, which weighs long ones more and is biased."""

    std: str = "sample"
    """Standard deviation: sample (over n - 1), or population."""

    singleton: str = "zero"
    """Advantage of a trajectory alone in its group: zero, or raw (its score, as verl keeps it)."""

    @property
    def unbiased(self) -> bool:
        """Whether the expected gradient is the true one, but for a positive factor."""
        return self.normalize == "mean" and self.statistics == "trajectories"

    def _weigh(self, group: Sequence[Trajectory], rewards: Numbers) -> Numbers:
        scores = [sum(of_one) for of_one in rewards]
        return episode_advantages(
            scores,
            [[score] * len(of_one) for score, of_one in zip(scores, rewards, strict=True)],
            normalize=self.normalize,
            statistics=self.statistics,
            std=self.std,
            singleton=self.singleton,
        )
