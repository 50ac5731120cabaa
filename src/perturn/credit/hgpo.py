"""HGPO: a turn against others with the same last states, for histories of several lengths at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from perturn.bounds import Bound
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
from perturn.types import Trajectory


@dataclass(frozen=True)
class HGPO(GroupCredit):
    """Mean of a turn's advantages among turns with the same last k states; longer histories weigh more.

        A_it = sum_k (k + 1)^alpha A_k / (sum_k (k + 1)^alpha + 1e-6),   k = 1 .. history + 1

    A_k compares G_it = sum_j gamma^(j - t) r_ij with the returns of other turns with the same last k states. A k
    counts if there are at least two such turns and A_k is not 0. With `base_group`, the advantage of the trajectory
    counts as k = 0.

    Source: HGPO (hierarchy-of-groups policy optimization), the authors' recipe in verl-agent, `core_hgpo.py`.
    Differs: states are equal by `state_key`, not by text. As in the code, statistics of the base group run over turns
    with the sample standard deviation, and other groups have the population standard deviation.
    """

    gamma: Annotated[float, Bound(least=0, most=1)] = 0.95
    """Discount of the returns that are compared, in [0, 1]."""

    history: Annotated[int, Bound(least=0)] = 2
    """States before the present one in the longest history; >= 0."""

    alpha: Annotated[float, Bound(least=0)] = 1.0
    """Exponent of the weight of a history, without unit; >= 0. 0: all histories weigh the same."""

    normalize: Normalization = "mean"
    """mean, or std."""

    base_group: bool = False
    """Whether the advantage of the trajectory in its group counts too."""

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return CreditTraits(needs_group=True, discount=self.gamma)

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
    """Return the weighted mean of the advantages that are not 0."""
    counted = [(weight, advantage) for weight, advantage in levels if advantage]
    return sum(w * a for w, a in counted) / (sum(w for w, _ in counted) + EPSILON)
