"""Row maker `progress-pairs`: turns that bring the success nearer over turns that do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from perturn.extend import (
    ANY_BRANCHES,
    BRANCHES,
    COUNT,
    IN_GROUP,
    DataError,
    Distance,
    Made,
    Paired,
    PreferencePair,
    RowInputs,
    RowTraits,
    Sense,
    Trajectory,
    actions_of,
    bounded,
    branches_of,
    failed,
    made,
    pair_ending,
    paired_within_branches,
    score,
)


@dataclass(frozen=True)
@bounded
class ProgressPairs:
    """Pair turns that bring the success nearer with turns that do not, among episodes with the same earlier turns.

    Episodes that branch off from one turn form a group with the episode that they branch off from. The episode with
    the highest total reward whose next turn is right is preferred to the episode with the lowest total reward whose
    next turn is wrong, and so on. Among equal rewards the first episode is taken; the resumed episode comes before
    its branches.

    Source: Lai et al. 2024, "Step-DPO: Step-wise Preference Optimization for Long-chain Reasoning of LLMs",
    arXiv:2406.18629, by its abstract.
    Differs: a turn is right if it shortens the distance to a success; no model judges it.
    """

    distance: Sense = "shortest"
    """How the distance to a success is measured; see `perturn.envs.abilities.Pathfinder`."""
    per_group: Annotated[int, COUNT] | None = 1
    """Largest number of pairs with the same first turns; None: as many as possible, with each episode in one pair."""
    length: Literal["episode", "turn"] = "episode"
    """Where both sides end: at the end of their episodes, or with the turn in which they differ."""

    @property
    def traits(self) -> RowTraits:
        """Pairs of one turn do not read how branches end."""
        takes = ANY_BRANCHES | ({"cut-branches"} if self.length == "turn" else set())
        return RowTraits("pairs", branches=BRANCHES, takes=takes)

    @property
    def needs(self) -> tuple[Distance, ...]:
        """The way to a success that is left around each turn."""
        return (Distance(self.distance),)

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the pairs, by resumed episode, by turn and then by rank."""

        def pair(begun: Sequence[Trajectory], branches: Sequence[Trajectory]) -> Paired:
            # A world that did not come back does not do so now.
            ended = inputs.measure([one for one in branches if not failed(one)])
            broken = [one for one in branches if failed(one)]
            one_turn = self.length == "turn"
            return pair_right_with_wrong(
                inputs.measure(begun), [*ended, *broken], per_group=self.per_group, one_turn=one_turn
            )

        return made(paired_within_branches(inputs, pair), "no right turn beside a wrong one")


def pair_right_with_wrong(
    explored: Sequence[Trajectory],
    branches: Iterable[Trajectory],
    *,
    per_group: int | None = 1,
    one_turn: bool = False,
) -> Paired:
    """Pair turns that bring the success nearer with turns that do not, among episodes with the same earlier turns.

    See `ProgressPairs`.

    Args:
        explored: Trajectories that branch, with the remaining path of their turns.
        branches: Their branches, measured too; FAILED ones need not be.
        per_group: Pairs that share their first turns, at most; None: as many as there are, each trajectory in one.
        one_turn: Whether both sides end with the turn in which they part.

    Returns:
        The pairs, by explored episode, by turn and then by rank; and counts: each trajectory of a group under one of
        `IN_GROUP`, so that an explored episode is counted once for each turn that it branches from.

    Raises:
        DataError: If the remaining path of a turn in question was not measured.
    """
    counts = Counter(dict.fromkeys(IN_GROUP, 0))
    pairs: list[PreferencePair] = []
    for one, by_turn in zip(explored, branches_of(explored, branches), strict=True):
        for turn in sorted(by_turn):
            group = [one, *by_turn[turn]]
            ended = [each for each in group if not failed(each)]
            counts["failed"] += len(group) - len(ended)
            right = sorted((each for each in ended if not _is_wrong(each, turn)), key=lambda one: -score(one))
            wrong = sorted((each for each in ended if _is_wrong(each, turn)), key=score)
            counts["alone"] += abs(len(right) - len(wrong))
            for rank, (best, worst) in enumerate(zip(right, wrong, strict=False)):
                outcome = "over" if per_group is not None and rank >= per_group else "kept"
                if actions_of(best)[turn] == actions_of(worst)[turn]:
                    outcome = "identical"
                counts[outcome] += 2
                if outcome == "kept":
                    pairs.append(pair_ending(best, worst, turn if one_turn else None))
    return pairs, counts


def _is_wrong(one: Trajectory, turn: int) -> bool:
    """Return whether a turn brought the success no nearer."""
    remaining = one.turns[turn].remaining
    if remaining is None:
        raise DataError(
            f"task {one.task.id!r:.80}, sample {one.sample}: turns[{turn}].remaining was not measured; measure "
            "it, as `perturn pair` does."
        )
    return remaining.is_wrong
