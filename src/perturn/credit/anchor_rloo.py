"""anchor-rloo: a turn's return less the mean return of other trajectories at the same state."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Annotated

from perturn.bounds import Bound
from perturn.credit.group_statistics import GroupCredit, anchors, means_of_others, returns_to_go
from perturn.credit.protocol import CreditTraits
from perturn.credit.returns import Numbers
from perturn.types import Trajectory


@dataclass(frozen=True)
class AnchorRLOO(GroupCredit):
    """Return from a turn on, minus the mean return of other episodes from the same state.

        A_it = gamma^t (G_it - b_it),   b_it = mean of G_ju over visits of state s_it by trajectories j != i
        no such visit:  b_it = (mean_(j != i) G_j0 - C_it) / gamma^t,  so that A_it = G_i0 - mean_(j != i) G_j0

    G_it = sum_k gamma^(k - t) r_ik, and C_it = sum_(k < t) gamma^k r_ik is the reward already collected. A baseline
    may depend on the state, on the turns before it and on other trajectories, since none of these depends on the
    action. So the expected gradient is grad E[G_i0]. The discounted objective needs the factor gamma^t, which GiGPO
    omits. The baseline excludes all visits by trajectory i, because its later visits to the state depend on the
    action. Run `perturn check-credit anchor-rloo gamma=0.9` to measure the bias.

    Source: ours.
    Differs: nothing. A turn without a state key shares its state with no other turn. A trajectory alone in its group
    gets 0.
    """

    gamma: Annotated[float, Bound(least=0, most=1)] = 1.0
    """Discount of the return that training maximizes, in [0, 1]."""

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return CreditTraits(needs_group=True, unbiased=True, compares_states=True, discount=self.gamma)

    def _weigh(self, group: Sequence[Trajectory], rewards: Numbers) -> Numbers:
        to_go = [returns_to_go(of_one, self.gamma) for of_one in rewards]
        scores = [of_one[0] if of_one else 0.0 for of_one in to_go]
        total = fsum(scores)
        weights = [
            [score - (total - score) / (len(group) - 1)] * len(of_one)
            for score, of_one in zip(scores, to_go, strict=True)
        ]
        for visits in anchors(group):
            values = [to_go[i][t] for i, t in visits]
            others = means_of_others([i for i, _ in visits], values)
            for i, t in visits:
                if i in others:
                    weights[i][t] = self.gamma**t * (to_go[i][t] - others[i])
        return weights
