"""ARPO: GRPO over all leaves of a task's trees; a shared turn gets the sum or mean of its leaves' advantages."""

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
"""Reduction of the advantages of all leaves that share a turn to the weight of the turn."""


@dataclass(frozen=True)
class ARPO(GroupCredit):
    """GRPO over trees of episodes: the weight of a turn sums the advantages of all episodes that share it.

        A_l = (S_l - mean(S)) / (std(S) + 1e-6),   A_t = sum or mean of A_l over the leaves l that share turn t

    A leaf is an explored episode or a branch. S is its score, including the rewards of shared turns.

    Source: Dong et al. 2025, "Agentic Reinforced Policy Optimization", arXiv:2507.19849, by its abstract and notes on
    its code.
    Differs: one number per turn. In the code each leaf is a row, with copies of its shared turns. A copy has the mean
    of its leaves' advantages, or the advantage of its own leaf; the sum over copies is the same. Here a shared turn is
    trained once, with this sum (`shared` sum). With `shared` mean it has the mean, so turns after a fork weigh more.
    The explorer decides where forks are.
    """

    traits: ClassVar[CreditTraits] = CreditTraits(needs_group=True, trains_branches=True)

    normalize: Normalization = "std"
    """std (as in the paper): subtract the mean and divide by the standard deviation. mean: only subtract the mean."""

    std: Deviation = "sample"
    """Standard deviation: sample (over n - 1), or population."""

    shared: Annotated[str, OneOf(SHARED)] = "sum"
    """Weight of a turn from the advantages of its leaves: their sum, or their mean."""

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
