"""Shared functions of row makers of pairs: compare two episodes, pair best with worst, and check length limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from perturn.config.row_maker_settings import BESIDE, UNITS, Made, RowInputs
from perturn.data.origins import actions_of, best_by_task, ending_at, exchanges_of
from perturn.errors import DataError
from perturn.types import PreferencePair, Trajectory, failed

OUTCOMES = ("failed", "no_expert", "no_turns", "identical", "tie", "better_than_expert", "gap", "kept")
"""Outcomes of an explored trajectory that is paired with the expert; only the first outcome that applies is counted."""

IN_GROUP = ("failed", "no_turns", "alone", "over", "identical", "tie", "gap", "kept")
"""Outcomes of a trajectory that is paired within its group; `over`: the group already has its number of pairs."""

_REASONS = {
    "failed": "FAILED",
    "no_expert": "no expert episode of the task",
    "no_turns": "no turns",
    "identical": "the same actions as the other side",
    "tie": "the same reward as the other side",
    "better_than_expert": "a higher reward than the expert",
    "alone": "no episode to pair with",
    "too_long": "too long, or both sides are equal within the length limit",
    "filtered": "left out by rows.signals",
    "succeeded": "successes, which need no correction",
    "no_wrong_turn": "no wrong turn",
    "not_corrected": "no success of the expert from the first wrong turn on",
}
"""Outcomes of episodes without a pair, in words."""

_BELOW = {"gap", "no_drop"}
"""Outcomes of episodes that do not exceed the threshold."""

_SOLVED_TASKS = "explore tasks that the expert solves (in expert.file, compare the task ids)"

_ROUNDING = 1e-9
"""Difference below which two gaps count as equal. Rewards have rounding errors: 0.81 - 0.41 is 0.4 plus 6e-17."""

Paired = tuple[list[PreferencePair], Counter[str]]
"""Pairs, and the number of episodes for each outcome."""


def made(found: Paired, none: str) -> Made:
    """Return pairs and counts as the result of a row maker.

    If there is no pair, the result names the reason with the largest count. `over` is no reason, since a better ranked
    pair of the group has one.

    Args:
        found: Pairs and counts.
        none: Reason if most episodes do not exceed the threshold, or if there are none, such as `rows.threshold=0.4`.
    """
    pairs, counts = found
    if pairs:
        return Made(pairs, counts)
    units = {
        name: count for name, count in counts.items() if name not in UNITS and not name.startswith(BESIDE)
    }
    largest = max((name for name in units if name != "over"), key=lambda name: units[name], default="")
    if not units.get(largest) or largest in _BELOW:
        return Made(pairs, counts, f"no pair is left ({none})")
    reason = _REASONS.get(largest, largest.replace("_", " "))
    lacks = f"no pair is left ({units[largest]} of {sum(units.values())}: {reason})"
    if largest == "no_expert":
        return Made(pairs, counts, lacks, remedy=_SOLVED_TASKS)
    return Made(pairs, counts, lacks)


def starting(episodes: Sequence[Trajectory], inputs: RowInputs) -> list[Trajectory]:
    """Return the episodes whose first own turn fits the length limit of training."""
    cut = inputs.limit.too_long(episodes)
    return [one for one in episodes if one.key not in cut]


def parting(found: Paired, inputs: RowInputs, each: int = 1, prefix: str = "") -> Paired:
    """Remove pairs whose two sides do not differ within the length limit of training; see `Limit.equal`.

    The removed pairs are counted as `too_long`.

    Args:
        found: Pairs, and counts.
        inputs: Inputs of the row maker.
        each: Number that one pair adds to the count `kept`.
        prefix: Prefix of the names of the counts. `steps_`: the rejected sides are branches.
    """
    pairs, counts = found
    alike = inputs.limit.equal(pairs)
    lost = [pair.rejected for pair, is_alike in zip(pairs, alike, strict=True) if is_alike]
    if lost:
        counts[f"{prefix}kept"] -= each * len(lost)
        counts[f"{prefix}too_long"] += each * len(lost)
    if counts[f"{prefix}cut"]:  # only kept pairs count as cut
        whole = {one.key: len(one.turns) for one in (inputs.branches if prefix else inputs.explored)}
        counts[f"{prefix}cut"] -= sum(len(one.turns) < whole[one.key] for one in lost)
    return [pair for pair, is_alike in zip(pairs, alike, strict=True) if not is_alike], counts


def pair_with_expert(
    experts: Iterable[Trajectory],
    explored: Iterable[Trajectory],
    threshold: float = 0.4,
    *,
    max_extra_turns: int | None = None,
) -> Paired:
    """Pair each explored trajectory with the expert's trajectory of its task, if the expert is clearly better.

    See `ExpertPairs`.

    Args:
        experts: Trajectories of an expert. If a task has several, the first with the highest total reward is used.
            Trajectories that FAILED or have no turns are ignored.
        explored: Trajectories of the policy.
        threshold: Difference in total reward that a pair must exceed, in units of reward; finite and >= 0. At 0 every
            positive difference is kept.
        max_extra_turns: Maximum number of turns by which the rejected side may exceed the expert's trajectory. A
            longer side is cut at its end; its total reward still counts the whole episode. ETO and DMPO use 5. None: no
            limit.

    Returns:
        The pairs in the order of `explored`; and the number of explored trajectories for each outcome of `OUTCOMES`,
        with the number of cut rejected sides under `cut`.
    """
    best = best_by_task(experts)
    pairs: list[PreferencePair] = []
    counts = Counter(dict.fromkeys((*OUTCOMES, "cut"), 0))
    for trajectory in explored:
        expert = best.get(trajectory.task.id)
        rejected = cut(trajectory, expert, max_extra_turns)
        outcome = _outcome(expert, rejected, threshold)
        counts[outcome] += 1
        if expert is not None and outcome == "kept":
            counts["cut"] += rejected is not trajectory
            pairs.append(PreferencePair(chosen=expert, rejected=rejected))
    return pairs, counts


def pair_within_groups(
    explored: Iterable[Trajectory], threshold: float = 0.4, *, per_group: int | None = 1
) -> Paired:
    """Pair the best trajectory of each task with its worst, then the second best with the second worst, and so on.

    See `GroupPairs`.

    Args:
        explored: Trajectories of one or more policies, of several tasks, in any order.
        threshold: Difference in total reward that a pair must exceed, in units of reward; finite and >= 0.
        per_group: Maximum number of pairs of a task. None: as many as possible, with each trajectory in one pair.

    Returns:
        The pairs, ordered by task and by decreasing difference in reward; and the number of trajectories for each
        outcome of `IN_GROUP`.
    """
    ordered = sorted(explored, key=lambda one: one.key)
    tasks = groupby(ordered, key=lambda one: one.task.id)  # not `groups_of`, which splits a task by policy
    return best_over_worst([list(members) for _, members in tasks], threshold, per_group)


def best_over_worst(
    groups: Iterable[Sequence[Trajectory]], threshold: float, per_group: int | None
) -> Paired:
    """Pair the best trajectory of each group with its worst, then the second best with the second worst, and so on.

    Among equal total rewards, the trajectory that comes first in its group ranks higher. See `pair_within_groups`.
    """
    counts = Counter(dict.fromkeys(IN_GROUP, 0))
    pairs: list[PreferencePair] = []
    for members in groups:
        counts["failed"] += sum(map(failed, members))
        counts["no_turns"] += sum(not one.turns for one in members if not failed(one))
        group = [one for one in members if not failed(one) and one.turns]
        ranked = sorted(group, key=lambda one: -one.total_reward)
        most = len(ranked) // 2
        for rank in range(most):
            best, worst = ranked[rank], ranked[-1 - rank]
            is_over = per_group is not None and rank >= per_group
            outcome = "over" if is_over else _outcome(best, worst, threshold, same=exchanges_of)
            counts[outcome] += 2
            if outcome == "kept":
                pairs.append(PreferencePair(chosen=best, rejected=worst))
        counts["alone"] += len(ranked) - 2 * most
    return pairs, counts


def exceeds(gap: float, threshold: float) -> bool:
    """Return whether a gap exceeds a threshold by more than a rounding error."""
    return gap - threshold > _ROUNDING


def is_tie(gap: float) -> bool:
    """Return whether a gap is 0 up to a rounding error."""
    return abs(gap) <= _ROUNDING


def cut(trajectory: Trajectory, expert: Trajectory | None, max_extra_turns: int | None) -> Trajectory:
    """Cut a trajectory to the number of turns of the expert's trajectory plus `max_extra_turns`."""
    if expert is None or max_extra_turns is None:
        return trajectory
    return ending_at(trajectory, len(expert.turns) + max_extra_turns)


def _outcome(
    expert: Trajectory | None,
    rejected: Trajectory,
    threshold: float,
    same: Callable[[Trajectory], Sequence[object]] = actions_of,
) -> str:
    """Return the outcome of an episode that is compared with another one. Sides with equal `same` are identical."""
    if failed(rejected):
        return "failed"
    if expert is None:
        return "no_expert"
    check_comparable(expert, rejected)
    if not rejected.turns:
        return "no_turns"
    if same(expert) == same(rejected):
        return "identical"
    gap = expert.total_reward - rejected.total_reward
    if is_tie(gap):
        return "tie"
    if gap < 0:
        return "better_than_expert"
    return "kept" if exceeds(gap, threshold) else "gap"


def check_comparable(expert: Trajectory, explored: Trajectory) -> None:
    """Reject two trajectories of different environments, whose rewards are not comparable.

    Raises:
        DataError: If both name an environment, and the names differ.
    """
    one, other = expert.environment, explored.environment
    if one and other and one != other:
        raise DataError(
            f"task {expert.task.id!r}: expected expert and explored trajectories of one environment, "
            f"got {one!r} and {other!r}, whose rewards do not compare. Record one of them again."
        )


def pair_ending(chosen: Trajectory, rejected: Trajectory, turn: int | None) -> PreferencePair:
    """Return a pair whose sides end with the turn of this index; None: the whole trajectories."""
    if turn is None:
        return PreferencePair(chosen, rejected)
    return PreferencePair(ending_at(chosen, turn + 1), ending_at(rejected, turn + 1))


def paired_within_branches(
    inputs: RowInputs,
    pair: Callable[[Sequence[Trajectory], Sequence[Trajectory]], Paired],
    *,
    of_steps: bool = False,
) -> Paired:
    """Pair episodes with their branches, if their first turns fit the length limit of training.

    Args:
        inputs: Inputs of the row maker.
        pair: Function from explored episodes and their branches to pairs and counts.
        of_steps: Unit of the counts. True: `pair` counts branching turns of the explored episodes, and gives each turn
            at most one pair. False: `pair` counts memberships in groups. A branch is in one group, and an explored
            episode in one group per branching turn.

    Returns:
        Pairs, and counts, with the number of units that do not fit under `too_long`.
    """
    fitting = starting(inputs.begun, inputs)
    kept = {one.key for one in fitting}
    branches = inputs.branches
    pairs, counts = pair(fitting, [one for one in branches if (one.task.id, one.origin) in kept])
    turns = {(one.task.id, one.origin, one.taken_over) for one in branches}
    unit, asked = ("steps", len(turns)) if of_steps else ("memberships", len(branches) + len(turns))
    counts["too_long"] = asked - counts.total()
    counts[unit] = asked
    return parting((pairs, counts), inputs, each=1 if of_steps else 2)
