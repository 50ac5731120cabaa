"""RLOO: a trajectory's score minus the mean score of the other trajectories."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from perturn.credit.group_statistics import GroupCredit, Singleton, Unit
from perturn.credit.protocol import CreditTraits
from perturn.credit.returns import Numbers
from perturn.types import Trajectory


@dataclass(frozen=True)
class RLOO(GroupCredit):
    """Score of the episode minus the mean score of the task's other episodes, equal for all of its turns.

        A_it = S_i - mean_(j != i) S_j,   S_i = sum_t r_it

    Source: Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human
    Feedback in LLMs", arXiv:2402.14740, Eq. 7.
    Differs: one number per turn. `statistics` steps averages over turns, as verl-agent's code does. It leaves out one
    turn instead of a whole trajectory, so the baseline contains the other turns of the trajectory. A trajectory alone
    in its group gets 0, unless `singleton` is raw.
    """

    statistics: Unit = "trajectories"
    """Unit that the baseline leaves out: trajectories (the whole trajectory), or steps (one turn, which is biased)."""

    singleton: Singleton = "zero"
    """Advantage of a trajectory alone in its group: zero, or raw (its score, as in verl)."""

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return CreditTraits(
            needs_group=True, weighs_alone=self.singleton == "raw", unbiased=self.statistics == "trajectories"
        )

    def _weigh(self, group: Sequence[Trajectory], rewards: Numbers) -> Numbers:
        scores = [sum(of_one) for of_one in rewards]
        times = [1 if self.statistics == "trajectories" else len(of_one) for of_one in rewards]
        count, total = sum(times), fsum(s * n for s, n in zip(scores, times, strict=True))
        if min(len(scores), count) < 2:
            keep = 1.0 if self.singleton == "raw" else 0.0
            return [[keep * score] * len(of_one) for score, of_one in zip(scores, rewards, strict=True)]
        return [
            [(score - total / count) * count / (count - 1)] * len(of_one)
            for score, of_one in zip(scores, rewards, strict=True)
        ]
