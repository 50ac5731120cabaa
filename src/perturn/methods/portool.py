"""PORTool: the value of a segment relative to the other children of its fork, and to the other trees."""

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
"""Mean that a value is compared with: of the others, or of all, its own among them."""

COUNTS = ("even", "leaves", "once")
"""How often a turn counts: 1 before the first fork; after a fork the children share the count evenly; once
for every leaf below it, as where each leaf is a row of its own; or once."""


@dataclass(frozen=True)
class PORTool(GroupCredit):
    """Value of a segment of turns minus the other branches of its fork, blended with the tree's score.

        A = m ((1 - blend) (V - mean of V over the fork's other children)
               + blend (R + V - mean of V over the other trees))

    A segment begins at the first turn or at a fork, and ends at the next fork or at the end; its turns have one
    number. V is the value of a segment, or of the first segment of a tree (`perturn.credit.branch_forest`). R is the
    reward before the segment. All trees of a task count as children of one fork before the first turn, so both parts
    are equal for first segments. m is the share of a segment. It is 1 for the first segment. After a fork, it is the
    share of the segment before the fork, divided by the number of children. The baselines of a segment contain no
    episode that shares a turn with it.

    Source: Wu et al. 2025, "PORTool: Tool-Use LLM Training with Rewarded Tree", arXiv:2510.26020, by its abstract: a
    step has one reward in all trajectories that share it, by what it reaches; fork-relative advantages are blended with
    trajectory-relative ones.
    Differs: three changes make the expected gradient exact: means over the other episodes, equal weights of the
    children of a fork (the paper averages leaves), and shares. `value` leaves, `baseline` group, `normalize` std and
    `count` leaves are the paper's, as far as its abstract tells. `returns.invalid_penalty` replaces its reward for
    well-formed tool calls. The explorer decides where forks are. The paper's weights of the blend are not known.
    """

    blend: Annotated[float, Bound(least=0, most=1)] = 0.5
    """Weight of the comparison with other trees, in [0, 1]; the comparison within the fork has 1 minus this
    weight."""

    value: Annotated[str, OneOf(VALUES)] = "tree"
    """How leaves are averaged: tree (the children of a fork count equally), or leaves (all leaves below count
    equally, so a child with more forks counts more)."""

    baseline: Annotated[str, OneOf(BASELINES)] = "others"
    """Mean that is subtracted: others, or group (which includes the own value)."""

    normalize: Normalization = "mean"
    """mean; or std, which also divides by the standard deviation of the values of a fork's children, and of the
    scores of all leaves."""

    count: Annotated[str, OneOf(COUNTS)] = "even"
    """How often a turn counts: even (the children of a fork share its count evenly), leaves (once for each leaf below
    it), or once."""

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
        # Of leaves: values of trees may lie close together where stretches within them do not.
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
        """Return a stretch against the other children of its fork; 0 where there is none."""
        if not each.siblings:
            return 0.0
        children = [each.value, *each.siblings]
        centre = mean(children if self.baseline == "group" else each.siblings)
        return (each.value - centre) / self._scale(children)

    def _scale(self, values: Sequence[float]) -> float:
        """Return the divisor of differences between values; differences of equal ones are nothing whatever it is."""
        return 1.0 if self.normalize == "mean" or max(values) == min(values) else deviation(values) + EPSILON
