"""TRLOO: a turn's return minus the mean return of other trajectories from the same turn on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from perturn.bounds import Bound
from perturn.credit.group_statistics import (
    GroupCredit,
    generalized_advantages,
    means_of_others,
    returns_to_go,
)
from perturn.credit.protocol import CreditTraits
from perturn.credit.returns import Numbers
from perturn.types import Trajectory


@dataclass(frozen=True)
class TRLOO(GroupCredit):
    """Return from a turn on, minus the mean return of the task's other episodes from the same turn on.

        A_it = G_it - b_it,   b_it = mean_(j != i, T_j > t) G_jt,   G_it = sum_k gamma^(k - t) r_ik

    Source: "Dr. Kernel: Reinforcement Learning Done Right for Triton Kernel Generations", whose abstract names the
    turn-level leave-one-out and the bias of a group that contains the turn itself.
    Differs: the abstract does not cover turns that no other trajectory reached. Their b_it is the mean G_j0 of the
    other trajectories minus sum_(k < t) gamma^k r_ik. It depends on no action from turn t on. `lam` below 1 mixes in
    the baseline of the next turn, as in GAE; this is Perturn's addition. The abstract has gamma = 1. For a smaller
    gamma, the credit omits the factor gamma^t of the discounted objective. A trajectory alone in its group gets 0.
    """

    gamma: Annotated[float, Bound(above=0, most=1)] = 1.0
    """Discount from one turn to the next, in (0, 1]."""

    lam: Annotated[float, Bound(least=0, most=1)] = 1.0
    """Lambda of GAE, in [0, 1]. At 1 an advantage counts all later rewards; at smaller values the baselines of later
    turns replace distant rewards."""

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return CreditTraits(needs_group=True, unbiased=self.gamma == 1 and self.lam == 1, discount=self.gamma)

    def _weigh(self, group: Sequence[Trajectory], rewards: Numbers) -> Numbers:
        to_go = [returns_to_go(of_one, self.gamma) for of_one in rewards]
        reached = [
            [i for i, of_one in enumerate(to_go) if len(of_one) > t] for t in range(max(map(len, to_go)))
        ]
        same = [means_of_others(those, [to_go[i][t] for i in those]) for t, those in enumerate(reached)]
        scores = [of_one[0] if of_one else 0.0 for of_one in to_go]
        others = means_of_others(range(len(scores)), scores)
        return [
            generalized_advantages(of_one, self._baselines(i, of_one, same, others[i]), self.gamma, self.lam)
            for i, of_one in enumerate(rewards)
        ]

    def _baselines(
        self, i: int, rewards: list[float], same: Sequence[Mapping[int, float]], others: float
    ) -> list[float]:
        """Return the baseline b_it of each turn of one trajectory, in units of reward [turns]."""
        collected, found = 0.0, []
        for t, reward in enumerate(rewards):
            found.append(same[t].get(i, others - collected))
            collected += self.gamma**t * reward
        return found
