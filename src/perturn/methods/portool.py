"""PORTool: the value of a segment compared with the other children of its fork, and with the other trees."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from perturn.extend import Bound, OneOf, Trajectory
from perturn.extend.tensors import (
    EPSILON,
    VALUES,
    CreditTraits,
    GroupCredit,
    Normalization,
    Numbers,
    Stretch,
    deviation,
    forest,
    mean,
    means_of_others,
)

BASELINES = ("others", "group")
"""Baseline of a value. others: the mean of the other values. group: the mean of all values, including its own."""

COUNTS = ("even", "leaves", "once")
"""Number of times that a turn counts. even: once before the first fork, and the children of a fork share its count
evenly. leaves: once for each leaf below the turn, as if each leaf were a row. once: once."""


@dataclass(frozen=True)
class PORTool(GroupCredit):
    """Value of a segment of turns minus the mean value of its fork's other branches, blended with the tree's score.

        A = m ((1 - blend) (V - mean of V over the fork's other children)
               + blend (R + V - mean of V over the other trees))

    A segment begins at the first turn or at a fork, and ends at the next fork or at the end. All turns of a segment
    have the same number. V is the value of a segment, or of the first segment of a tree
    (`perturn.credit.branch_forest`). R is the reward before the segment. All trees of a task count as children of one
    fork before the first turn, so both parts are equal for first segments with the default settings. m is the share of
    a segment. The share is 1 for the first segment, and each fork divides it by its number of children. The baselines
    of a segment contain no episode that shares a turn with the segment.

    Source: Wu et al. 2025, "PORTool: Tool-Use LLM Training with Rewarded Tree", arXiv:2510.26020, by its abstract: all
    trajectories that share a step give it one reward, which depends on the outcomes that the step reaches.
    Fork-relative and trajectory-relative advantages are blended.
    Differs: three changes make the expected gradient exact: means over the other episodes, equal weights of the
    children of a fork (the paper averages leaves), and shares. The paper's settings, as far as its abstract shows, are
    `value` leaves, `baseline` group, `normalize` std and `count` leaves. `returns.invalid_penalty` replaces the paper's
    reward for well-formed tool calls. The explorer decides where forks are. The paper's weights of the blend are not
    known.
    """

    blend: Annotated[float, Bound(least=0, most=1)] = 0.5
    """Weight of the comparison with other trees, in [0, 1]. The comparison within the fork has weight 1 - blend."""

    value: Annotated[str, OneOf(VALUES)] = "tree"
    """Averaging of the leaves below a segment. tree: the children of a fork weigh the same. leaves: all leaves weigh
    the same, so a child with more leaves weighs more."""

    baseline: Annotated[str, OneOf(BASELINES)] = "others"
    """Mean to subtract from a value. others: the mean of the other values. group: the mean of all values."""

    normalize: Normalization = "mean"
    """mean: subtract the mean. std: then divide by a standard deviation too, over the children of the fork and over the
    scores of all leaves."""

    count: Annotated[str, OneOf(COUNTS)] = "even"
    """Number of times that a turn counts. even: a fork divides its own number evenly among its children. leaves: once
    for each leaf below the turn. once: once."""

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        how = (self.value, self.baseline, self.normalize, self.count)
        unbiased = how == ("tree", "others", "mean", "even")
        return CreditTraits(needs_group=True, trains_branches=True, unbiased=unbiased)

    def _weigh(self, group: Sequence[Trajectory], rewards: Numbers) -> Numbers:
        trees = forest(group, rewards, self.value)
        compared = [
            (index, score)
            for index, tree in enumerate(trees)
            for score in (tree.scores if self.value == "leaves" else (tree.value,))
        ]
        owners, scores = [list(side) for side in zip(*compared, strict=True)]
        centres = dict.fromkeys(owners, mean(scores))
        if self.baseline == "others" or len(trees) == 1:
            centres = means_of_others(owners, scores)
        # The deviation is over leaves: values of trees can be close together while their segments differ.
        scale = self._scale([score for tree in trees for score in tree.scores])
        found = [[0.0] * len(of_one) for of_one in rewards]
        for index, tree in enumerate(trees):
            for each in tree.stretches:
                across = (each.score - centres[index]) / scale if index in centres else 0.0
                advantage = (1 - self.blend) * self._within(each) + self.blend * across
                times = {"even": each.share, "leaves": each.leaves, "once": 1}[self.count]
                found[each.member][each.start : each.stop] = [times * advantage] * (each.stop - each.start)
        return found

    def _within(self, each: Stretch) -> float:
        """Return the advantage of a stretch within its fork; 0 if the fork has no other children."""
        if not each.siblings:
            return 0.0
        children = [each.value, *each.siblings]
        centre = mean(children if self.baseline == "group" else each.siblings)
        return (each.value - centre) / self._scale(children)

    def _scale(self, values: Sequence[float]) -> float:
        """Return the divisor of differences: 1, or with `normalize` std the deviation of the values if they differ."""
        return 1.0 if self.normalize == "mean" or max(values) == min(values) else deviation(values) + EPSILON
