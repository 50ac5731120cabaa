"""Row maker `branch-pairs`: among episodes that share their first turns, the best over the worst."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from perturn.bounds import Bound, bounded
from perturn.config.row_maker_settings import ANY_BRANCHES, BRANCHES, Made, RowInputs, RowTraits
from perturn.config.sections import COUNT
from perturn.data.origins import actions_of, branches_of, ending_at
from perturn.needs import Need
from perturn.rows.pairing import Paired, best_over_worst, made, paired_within_branches
from perturn.types import Trajectory, failed


@dataclass(frozen=True)
@bounded
class BranchPairs:
    """Pair the best with the worst of the episodes that share their first turns, and so on, by total reward.

    Episodes that branch off from one turn form a group with the episode that they branch off from. So both sides
    share the turns before this turn; `align.shared_prefix` keeps or masks these turns in training. If `length` is
    turn, the best is compared with episodes whose turn differs.

    Source: Lai et al. 2024, "Step-DPO", arXiv:2406.18629; Chen et al. 2024, "Advancing Tool-Augmented Large Language
    Models: Integrating Insights from Errors in Inference Trees" (TP-LLaMA), arXiv:2406.07115; both by their abstracts.
    Differs: the total reward of an episode decides which side is better, and not a process reward model. Both papers
    compare one step, as `one_turn` does; by default both sides go on to the end. If `explored` has episodes of an
    expert, a step of the expert is compared with steps of the policy. TP-LLaMA's expert searches a tree that contains
    failures.
    """

    traits: ClassVar[RowTraits] = RowTraits("pairs", branches=BRANCHES, takes=ANY_BRANCHES)
    needs: ClassVar[tuple[Need, ...]] = ()

    threshold: Annotated[float, Bound(least=0)] = 0.4
    """Score gap a pair must exceed."""
    per_group: Annotated[int, COUNT] | None = 1
    """Largest number of pairs with the same first turns; None: as many as possible, with each episode in one pair."""
    length: Literal["episode", "turn"] = "episode"
    """Where both sides end: at the end of their episodes, or with the turn in which they differ."""

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the pairs, by resumed episode, by turn and then by gap, largest first."""

        def pair(begun: Sequence[Trajectory], branches: Sequence[Trajectory]) -> Paired:
            one_turn = self.length == "turn"
            return pair_within_branches(
                begun, branches, self.threshold, per_group=self.per_group, one_turn=one_turn
            )

        return made(paired_within_branches(inputs, pair), f"rows.threshold={self.threshold:g}")


def pair_within_branches(
    explored: Sequence[Trajectory],
    branches: Iterable[Trajectory],
    threshold: float = 0.4,
    *,
    per_group: int | None = 1,
    one_turn: bool = False,
) -> Paired:
    """Pair the best of the episodes that share their first turns with the worst, and so on, as `GroupPairs`.

    See `BranchPairs`.

    Args:
        explored: Trajectories with branches: the policy's, or an expert's.
        branches: Branches of them.
        threshold: tau, in units of total reward; finite and >= 0.
        per_group: Pairs that share their first turns, at most; None: as many as there are, each trajectory in one.
        one_turn: Whether both sides end with the turn in which they part; their total rewards still count the whole
            episodes.

    Returns:
        The pairs, by explored episode, by turn and then by gap, largest first; and counts: each trajectory of a group
        under one of `IN_GROUP`, so that an explored episode is counted once for each of its branching turns.
    """
    groups, alike = [], 0
    for one, by_turn in zip(explored, branches_of(explored, branches), strict=True):
        for turn in sorted(by_turn):
            group = [one, *by_turn[turn]]
            if one_turn:
                whole = len(group)
                group = _unlike_best([ending_at(each, turn + 1) for each in group])
                alike += whole - len(group)
            groups.append(group)
    pairs, counts = best_over_worst(groups, threshold, per_group)
    counts["identical"] += alike
    return pairs, counts


def _unlike_best(group: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the group without those that did what the best of it did; FAILED ones stay."""
    best = max((one for one in group if not failed(one)), key=lambda one: one.total_reward, default=None)
    return [
        one
        for one in group
        if best is None or one is best or failed(one) or actions_of(one) != actions_of(best)
    ]
