"""Row maker `progress-pairs`: pairs of a turn that comes closer to success (chosen) and a turn that does not."""

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
    """Pair turns that come closer to success with turns that do not, among episodes with the same earlier turns.

    An explored episode and its branches from one turn form a group. At this turn, an episode's action is right or
    wrong. The right episode with the highest total reward is paired with the wrong episode with the lowest total
    reward, and so on. Among equal rewards the first episode is taken; the explored episode comes before its branches.

    Source: Lai et al. 2024, "Step-DPO: Step-wise Preference Optimization for Long-chain Reasoning of LLMs",
    arXiv:2406.18629, by its abstract.
    Differs: a turn is right if it shortens the distance to a success, and no model judges it.
    """

    distance: Sense = "shortest"
    """Measure of the distance to a success; see `perturn.envs.abilities.Pathfinder`."""
    per_group: Annotated[int, COUNT] | None = 1
    """Maximum number of pairs with the same first turns. None: as many as possible, with each episode in one pair."""
    length: Literal["episode", "turn"] = "episode"
    """Last turn of both sides. episode: the last turn of the episode. turn: the turn in which the two sides differ."""

    @property
    def traits(self) -> RowTraits:
        """Traits of the rows. With `length` turn, branches may be cut, since their ends are not used."""
        takes = ANY_BRANCHES | ({"cut-branches"} if self.length == "turn" else set())
        return RowTraits("pairs", branches=BRANCHES, takes=takes)

    @property
    def needs(self) -> tuple[Distance, ...]:
        """Distance to a success around each turn."""
        return (Distance(self.distance),)

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the pairs, ordered by explored episode, by turn and by rank."""

        def pair(begun: Sequence[Trajectory], branches: Sequence[Trajectory]) -> Paired:
            one_turn = self.length == "turn"
            return pair_right_with_wrong(
                inputs.measure(begun), inputs.measure(branches), per_group=self.per_group, one_turn=one_turn
            )

        return made(paired_within_branches(inputs, pair), "no right turn beside a wrong one")


def pair_right_with_wrong(
    explored: Sequence[Trajectory],
    branches: Iterable[Trajectory],
    *,
    per_group: int | None = 1,
    one_turn: bool = False,
) -> Paired:
    """Pair turns that come closer to success with turns that do not, among episodes with the same earlier turns.

    See `ProgressPairs`.

    Args:
        explored: Trajectories from which the branches start, with the measured distance to a success.
        branches: Branches of these trajectories, with the measured distance too; FAILED branches need none.
        per_group: Maximum number of pairs with the same first turns. None: as many as possible, with each trajectory in
            one pair.
        one_turn: Whether both sides end with the turn in which they differ.

    Returns:
        The pairs, ordered by explored episode, by turn and by rank; and the number of trajectories for each outcome of
        `IN_GROUP`. An explored episode counts once for each of its branching turns.

    Raises:
        DataError: If the distance was not measured at a turn that is compared.
    """
    counts = Counter(dict.fromkeys(IN_GROUP, 0))
    pairs: list[PreferencePair] = []
    for one, by_turn in zip(explored, branches_of(explored, branches), strict=True):
        for turn in sorted(by_turn):
            group = [one, *by_turn[turn]]
            ended = [each for each in group if not failed(each) and len(each.turns) > turn]
            counts["failed"] += sum(map(failed, group))
            counts["no_turns"] += sum(not failed(each) for each in group) - len(ended)
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
    """Return whether a turn came no closer to success.

    Raises:
        DataError: If the distance was not measured.
    """
    remaining = one.turns[turn].remaining
    if remaining is None:
        raise DataError(
            f"task {one.task.id!r:.80}, sample {one.sample}: turns[{turn}].remaining was not measured; measure "
            "it, as `perturn pair` does."
        )
    return remaining.is_wrong
