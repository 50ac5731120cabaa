"""HGPO: compare each turn with turns that share its last k states, for several k at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from perturn.bounds import NOT_NEGATIVE, Bound
from perturn.credit.group_statistics import (
    EPSILON,
    GroupCredit,
    Normalization,
    anchors,
    episode_advantages,
    normalized_within,
    on_each_turn,
    returns_to_go,
)
from perturn.credit.protocol import CreditTraits
from perturn.credit.returns import Numbers
from perturn.group import ROUNDING
from perturn.types import Trajectory


@dataclass(frozen=True)
class HGPO(GroupCredit):
    """Weighted mean over k of a turn's advantage among turns with the same last k states; larger k weigh more.

        A_it = sum_k (k + 1)^alpha A_k / (sum_k (k + 1)^alpha + 1e-6),   k = 1 .. history + 1

    A_k is G_it = sum_j gamma^(j - t) r_ij minus the mean return of all turns with the same last k states. It is 0 if no
    other turn has the same last k states. The mean leaves out every A_k that is 0, up to rounding. With `base_group`,
    the advantage of the trajectory in its group counts as k = 0.

    Source: HGPO (hierarchy-of-groups policy optimization), the authors' recipe in verl-agent, `core_hgpo.py`.
    Differs: states are equal by `state_key`, not by text. As in the code, the base group takes its statistics over
    turns, with the sample standard deviation. The other groups use the population standard deviation.
    """

    gamma: Annotated[float, Bound(least=0, most=1)] = 0.95
    """Discount of the return G from one turn to the next, in [0, 1]."""

    history: Annotated[int, Bound(least=0)] = 2
    """Number of earlier states in the longest comparison; >= 0. The largest k is `history` + 1."""

    alpha: Annotated[float, NOT_NEGATIVE] = 1.0
    """Exponent of the weight (k + 1)^alpha of A_k, without unit; >= 0. 0: all k weigh the same."""

    normalize: Normalization = "mean"
    """mean: subtract the mean. std: then divide by the standard deviation too."""

    base_group: bool = False
    """Whether to add the advantage of the trajectory in its group, as k = 0."""

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return CreditTraits(needs_group=True, compares_states=True, discount=self.gamma)

    def _weigh(self, group: Sequence[Trajectory], rewards: Numbers) -> Numbers:
        to_go = [returns_to_go(of_one, self.gamma) for of_one in rewards]
        levels = [
            ((k + 1) ** self.alpha, normalized_within(anchors(group, k), to_go, self.normalize, "population"))
            for k in range(1, self.history + 2)
        ]
        if self.base_group:
            scores = [sum(of_one) for of_one in rewards]
            copies = on_each_turn(scores, rewards)
            levels.append(
                (1.0, episode_advantages(scores, copies, normalize=self.normalize, statistics="steps"))
            )
        return [
            [_mean([(weight, level[i][t]) for weight, level in levels]) for t in range(len(of_one))]
            for i, of_one in enumerate(rewards)
        ]


def _mean(levels: list[tuple[float, float]]) -> float:
    """Return the weighted mean of the nonzero advantages, given (weight, advantage) pairs."""
    counted = [(weight, advantage) for weight, advantage in levels if abs(advantage) > ROUNDING]
    return sum(w * a for w, a in counted) / (sum(w for w, _ in counted) + EPSILON)
