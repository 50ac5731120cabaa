"""MaxRL: a trajectory's score minus the mean of its group, divided by this mean."""

from collections.abc import Sequence
from dataclasses import dataclass

from perturn.extend import Trajectory
from perturn.extend.tensors import EPSILON, ROUNDING, GroupCredit, Numbers, mean


@dataclass(frozen=True)
class MaxRL(GroupCredit):
    """Score of the episode minus the mean of its group, divided by this mean. Rare successes weigh more.

        A_it = (S_i - mean(S)) / (mean(S) + 1e-6),   S_i = sum_t r_it >= 0

    Source: SkyRL's estimator `maxrl` (`ppo_utils.py`). A rare success weighs more, as in the gradient of log p.
    Differs: one number per turn. Negative scores are rejected, since the division could change the sign. A score that
    is negative by rounding alone counts as 0.
    """

    def __post_init__(self) -> None:
        """Reject a penalty, which makes scores negative."""
        super().__post_init__()
        if self.returns.invalid_penalty:
            raise ValueError(
                "returns.invalid_penalty must be 0, since maxrl needs scores >= 0; leave the penalty out, or name "
                "another credit, such as grpo."
            )

    def _weigh(self, group: Sequence[Trajectory], rewards: Numbers) -> Numbers:
        scores = [sum(of_one) for of_one in rewards]
        if min(scores) < -ROUNDING:
            raise ValueError(
                f"maxrl needs scores >= 0, got {min(scores)} for task {group[0].task.id!r:.80}. Set "
                "returns.rewards=success, or name another credit, such as grpo."
            )
        scores = [max(score, 0.0) for score in scores]
        centre = mean(scores)
        return [
            [(score - centre) / (centre + EPSILON)] * len(of_one)
            for score, of_one in zip(scores, rewards, strict=True)
        ]
