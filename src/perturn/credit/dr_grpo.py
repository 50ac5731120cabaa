"""Dr. GRPO: a trajectory's score minus the mean of its group, without division by the standard deviation."""

from collections.abc import Sequence
from dataclasses import dataclass

from perturn.credit.group_statistics import GroupCredit, Singleton, Unit
from perturn.credit.grpo import GRPO
from perturn.credit.protocol import CreditTraits
from perturn.credit.returns import Numbers
from perturn.types import Trajectory


@dataclass(frozen=True)
class DrGRPO(GroupCredit):
    """Score of the episode minus the mean of its group, without division by the standard deviation.

        A_it = S_i - mean(S),   S_i = sum_t r_it

    Source: Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv:2503.20783, Section 3.
    Differs: one number per turn. Dr. GRPO also sums the loss over tokens: set `aggregate: token_sum` of `ppo-clip`.
    `statistics`, `singleton` and the computation are the same as in `grpo`.
    """

    statistics: Unit = "trajectories"
    """Unit of the mean. trajectories: each trajectory counts once. steps: each turn counts once, so long trajectories
    weigh more, which is biased."""

    singleton: Singleton = "zero"
    """Advantage of a trajectory alone in its group: zero, or raw (its score, as in verl)."""

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return self._credit.traits

    def _weigh(self, group: Sequence[Trajectory], rewards: Numbers) -> Numbers:
        return self._credit._weigh(group, rewards)

    @property
    def _credit(self) -> GRPO:
        return GRPO("mean", statistics=self.statistics, singleton=self.singleton, returns=self.returns)
