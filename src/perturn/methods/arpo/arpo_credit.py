"""ARPO: GRPO over all leaves of a task's trees, and of it for a shared turn what its leaves have."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from perturn.extend import OneOf, Trajectory
from perturn.extend.tensors import (
    EPSILON,
    CreditTraits,
    Deviation,
    GroupCredit,
    Normalization,
    Numbers,
    deviation,
    forest,
    mean,
)

SHARED = ("sum", "mean")
"""Number of a turn, from the advantages of the leaves that share it."""


@dataclass(frozen=True)
class ARPO(GroupCredit):
    """GRPO over trees of episodes: the weight of a turn sums the advantages of all episodes that share it.

        A_l = (S_l - mean(S)) / (std(S) + 1e-6),   A_t = sum or mean of A_l over the leaves l that share turn t

    A leaf is the end of an explored episode or of a branch. S is its score, with the rewards of shared turns.

    Source: Dong et al. 2025, "Agentic Reinforced Policy Optimization", arXiv:2507.19849, by its abstract and notes on
    its code.
    Differs: a number per turn. In the code each leaf is a row with copies of its shared turns. A copy has the mean of
    its leaves' advantages, or the advantage of its own leaf; the sum over copies is the same. Here a shared turn is
    trained once, and `shared` sum gives it this sum. `shared` mean gives it the mean, so turns after a fork weigh
    more. The explorer decides where forks are.
    """

    traits: ClassVar[CreditTraits] = CreditTraits(needs_group=True, trains_branches=True)

    normalize: Normalization = "std"
    """std (the paper's), or mean."""

    std: Deviation = "sample"
    """Standard deviation: sample (over n - 1), or population."""

    shared: Annotated[str, OneOf(SHARED)] = "sum"
    """Number of a turn: the sum of its leaves' advantages, or their mean."""

    def _weigh(self, group: Sequence[Trajectory], rewards: Numbers) -> Numbers:
        trees = forest(group, rewards, "leaves")
        scores = [score for tree in trees for score in tree.scores]
        found = [[0.0] * len(of_one) for of_one in rewards]
        if max(scores) == min(scores):
            return found
        centre = mean(scores)
        scale = deviation(scores, self.std) + EPSILON if self.normalize == "std" else 1.0
        for each in (stretch for tree in trees for stretch in tree.stretches):
            times = each.leaves if self.shared == "sum" else 1
            advantage = times * (each.score - centre) / scale
            found[each.member][each.start : each.stop] = [advantage] * (each.stop - each.start)
        return found
