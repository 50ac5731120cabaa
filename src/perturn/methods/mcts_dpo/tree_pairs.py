"""Row maker `tree-pairs`: pairs of the best (chosen) and the worst (rejected) step at each node of a search tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from perturn.extend import (
    ANY_BRANCHES,
    NOT_NEGATIVE,
    Made,
    Need,
    Node,
    Paired,
    PreferencePair,
    RowInputs,
    RowTraits,
    Trajectory,
    bounded,
    branches_of,
    came_back,
    exceeds,
    failed,
    grow,
    is_tie,
    made,
    parting,
)

IN_TREE = ("tie", "gap", "kept")
"""Outcomes of a node at which episodes took different steps; only the first outcome that applies is counted."""


@dataclass(frozen=True)
@bounded
class TreePairs:
    """Pair the best step at each node of a tree with the worst. The sides share all turns but the last.

    The value of a step is the mean score of the episodes that took it. A pair is kept if the values of the two steps
    differ by more than the threshold. Each side ends with its step, and its total reward is the value of the step.

    Source: Xie et al. 2024, "Monte Carlo Tree Search Boosts Reasoning via Iterative Preference Learning",
    arXiv:2405.00451.
    Differs: the value of a step is the mean outcome of its episodes, without the policy's judgment of its own step.
    All nodes give pairs, not only nodes of the best path. Pairs are not smoothed by how often a step was taken.
    """

    traits: ClassVar[RowTraits] = RowTraits("pairs", branches=frozenset({"tree"}), takes=ANY_BRANCHES)
    needs: ClassVar[tuple[Need, ...]] = ()

    threshold: Annotated[float, NOT_NEGATIVE] = 0.4
    """Difference in value that the two steps of a pair must exceed, in units of reward; >= 0."""

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the pairs, ordered by explored episode and by node; a node comes before the nodes below it."""
        branches = [one for one in inputs.branches if came_back(one)]
        pairs, counts = pair_within_trees(inputs.begun, branches, self.threshold)
        counts["too_long"], counts["nodes"] = 0, counts.total()
        return made(parting((pairs, counts), inputs), f"rows.threshold={self.threshold:g}")


def pair_within_trees(
    explored: Sequence[Trajectory], played_on: Iterable[Trajectory], threshold: float = 0.4
) -> Paired:
    """Pair the best step at each node of a tree with the worst. The sides share all turns but the last.

    See `TreePairs`.

    Args:
        explored: Trajectories of the policy, from which the trees grew.
        played_on: Branches of these trees. FAILED branches are left out of the means. A step that only FAILED episodes
            took is in no pair.
        threshold: Difference in value that the two steps of a pair must exceed, in units of reward; finite and >= 0.

    Returns:
        The pairs, ordered by explored episode and by node, with a node before the nodes below it; and the number of
        nodes with different steps for each outcome of `IN_TREE`.
    """
    pairs: list[PreferencePair] = []
    counts = Counter(dict.fromkeys(IN_TREE, 0))
    for one, by_turn in zip(explored, branches_of(explored, played_on), strict=True):
        root = grow(one, (each for found in by_turn.values() for each in found))
        for node in root.walk():
            steps = [child for child in node.children.values() if not all(map(failed, child.passed))]
            if len(steps) < 2:
                continue
            best, worst = max(steps, key=lambda step: step.value), min(steps, key=lambda step: step.value)
            outcome = _outcome(best.value - worst.value, threshold)
            counts[outcome] += 1
            if outcome == "kept":
                pairs.append(PreferencePair(_ended(best), _ended(worst)))
    return pairs, counts


def _outcome(gap: float, threshold: float) -> str:
    if is_tie(gap):
        return "tie"
    return "kept" if exceeds(gap, threshold) else "gap"


def _ended(step: Node) -> Trajectory:
    """Return an episode that took a step, cut after this step, with the value of the step as total reward."""
    one = next(one for one in step.passed if not failed(one))
    return replace(
        one,
        turns=one.turns[: step.depth],
        total_reward=step.value,
        success=False,
        terminated=False,
        truncated=True,
        error=None,
    )
