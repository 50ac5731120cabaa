"""Row maker `branch-pairs`: pairs of the best and the worst among episodes that share their first turns."""

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
    """Pair the best with the worst of the episodes that share their first turns, by total reward.

    With more than one pair, the second best is paired with the second worst, and so on. An explored episode and its
    branches from one turn form a group. So both sides share the turns before this turn; `align.shared_prefix` keeps or
    masks these turns in training. If `length` is turn, episodes with the same action as the best episode at this turn
    are left out.

    Source: Lai et al. 2024, "Step-DPO", arXiv:2406.18629; Chen et al. 2024, "Advancing Tool-Augmented Large Language
    Models: Integrating Insights from Errors in Inference Trees" (TP-LLaMA), arXiv:2406.07115; both by their abstracts.
    Differs: the total reward of an episode decides which side is better, not a process reward model. Both papers
    compare one step, as `length` turn does; by default both sides continue to the end of the episode. If the explored
    episodes come from an expert, a step of the expert is compared with steps of the policy. TP-LLaMA's expert searches
    a tree that contains failures.
    """

    traits: ClassVar[RowTraits] = RowTraits("pairs", branches=BRANCHES, takes=ANY_BRANCHES)
    needs: ClassVar[tuple[Need, ...]] = ()

    threshold: Annotated[float, Bound(least=0)] = 0.4
    """Difference in total reward that a pair must exceed, in units of reward; >= 0."""
    per_group: Annotated[int, COUNT] | None = 1
    """Maximum number of pairs with the same first turns. None: as many as possible, with each episode in one pair."""
    length: Literal["episode", "turn"] = "episode"
    """Last turn of both sides. episode: the last turn of the episode. turn: the turn in which the two sides differ."""

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the pairs, ordered by explored episode, by turn, and by decreasing difference in reward."""

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
    """Pair the best with the worst of the episodes that share their first turns, and so on; see `BranchPairs`.

    Args:
        explored: Trajectories from which the branches start, of the policy or of an expert.
        branches: Branches of these trajectories.
        threshold: Difference in total reward that a pair must exceed, in units of reward; finite and >= 0.
        per_group: Maximum number of pairs with the same first turns. None: as many as possible, with each trajectory in
            one pair.
        one_turn: Whether both sides end with the turn in which they differ. Their total rewards still count the whole
            episodes.

    Returns:
        The pairs, ordered by explored episode, by turn, and by decreasing difference in reward; and the number of
        trajectories for each outcome of `IN_GROUP`. An explored episode counts once for each of its branching turns.
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
    """Return the group without trajectories with the actions of its best trajectory; FAILED trajectories are kept."""
    best = max((one for one in group if not failed(one)), key=lambda one: one.total_reward, default=None)
    return [
        one
        for one in group
        if best is None or one is best or failed(one) or actions_of(one) != actions_of(best)
    ]
