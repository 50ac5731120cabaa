"""Shared by row makers of pairs: who is clearly better, best over worst, and where two sides part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from perturn.config.row_maker_settings import Made, RowInputs
from perturn.data.origins import actions_of, best_by_task, ending_at
from perturn.errors import DataError
from perturn.types import PreferencePair, Trajectory, failed

OUTCOMES = ("failed", "no_expert", "no_turns", "identical", "tie", "better_than_expert", "gap", "kept")
"""Outcomes of an explored trajectory: the first that holds."""

IN_GROUP = ("failed", "no_turns", "alone", "over", "identical", "tie", "gap", "kept")
"""Outcomes of a trajectory when its task is paired; `over`: it would be in one pair more than asked for."""

_ROUNDING = 1e-9
"""Rewards are sums and ratios of decimals: 0.81 - 0.41 is 0.4 plus 6e-17. Gaps this close are equal."""

Paired = tuple[list[PreferencePair], Counter[str]]
"""Pairs, and counts of what became of the episodes."""


def made(found: Paired, none: str) -> Made:
    """Return pairs and counts as a row maker does.

    Args:
        found: The pairs and counts.
        none: Why there may be no pair.
    """
    pairs, counts = found
    return Made(pairs, counts, "" if pairs else f"no pair is left ({none})")


def starting(episodes: Sequence[Trajectory], inputs: RowInputs) -> list[Trajectory]:
    """Return the episodes whose first own turn fits the length limit of training."""
    cut = inputs.limit.too_long(episodes)
    return [one for one in episodes if one.key not in cut]


def parting(found: Paired, inputs: RowInputs, each: int = 1) -> Paired:
    """Return the pairs whose sides part within the length limit of training; the others are counted as `too_long`.

    Args:
        found: Pairs whose sides begin with the same turns, and counts.
        inputs: Of the row maker.
        each: What a pair counts for under `kept`.
    """
    pairs, counts = found
    alike = inputs.limit.alike(pairs)
    lost = [pair.rejected for pair, is_alike in zip(pairs, alike, strict=True) if is_alike]
    if lost:
        counts["kept"] -= each * len(lost)
        counts["too_long"] += each * len(lost)
    if lost and "cut" in counts:  # of those that are kept
        whole = {one.key: len(one.turns) for one in inputs.explored}
        counts["cut"] -= sum(len(one.turns) < whole[one.key] for one in lost)
    return [pair for pair, is_alike in zip(pairs, alike, strict=True) if not is_alike], counts


def pair_with_expert(
    experts: Iterable[Trajectory],
    explored: Iterable[Trajectory],
    threshold: float = 0.4,
    *,
    max_extra_turns: int | None = None,
) -> Paired:
    """Pair each explored trajectory with the expert's of its task, where the expert's is clearly better.

    See `ExpertPairs`.

    Args:
        experts: Trajectories of an expert. Of several of a task, the first with the highest total reward is
            taken; a FAILED trajectory, or a trajectory without turns, does not count.
        explored: Trajectories of the policy.
        threshold: tau, in units of total reward; finite and >= 0. 0 keeps every gap.
        max_extra_turns: Cut the rejected side to this many turns more than its expert has, from the end; its
            total reward still counts the whole episode. ETO and DMPO take 5. None cuts nothing.

    Returns:
        The pairs in the order of `explored`, and counts: each explored trajectory under one of `OUTCOMES`,
        and beside these, under `cut`, how many of the kept ones were cut.
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
        explored: Trajectories of the policy, of several tasks, in any order.
        threshold: tau, in units of total reward; finite and >= 0.
        per_group: Pairs of a task, at most; None: as many as there are, each trajectory in one.

    Returns:
        The pairs, by task and then by gap, largest first; and counts: each trajectory under one of `IN_GROUP`.
    """
    groups: dict[str, list[Trajectory]] = {}
    for one in sorted(explored, key=lambda one: one.key):
        groups.setdefault(one.task.id, []).append(one)
    return best_over_worst(groups.values(), threshold, per_group)


def best_over_worst(
    groups: Iterable[Sequence[Trajectory]], threshold: float, per_group: int | None
) -> Paired:
    """Pair the best of each group with its worst, and so on; of equal rewards the first comes first."""
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
            outcome = _outcome(best, worst, threshold) if per_group is None or rank < per_group else "over"
            counts[outcome] += 2
            if outcome == "kept":
                pairs.append(PreferencePair(chosen=best, rejected=worst))
        counts["alone"] += len(ranked) - 2 * most
    return pairs, counts


def exceeds(gap: float, threshold: float) -> bool:
    """Return whether a gap is larger, by more than rounding."""
    return gap - threshold > _ROUNDING


def is_tie(gap: float) -> bool:
    """Return whether a gap is nothing but rounding."""
    return abs(gap) <= _ROUNDING


def cut(trajectory: Trajectory, expert: Trajectory | None, max_extra_turns: int | None) -> Trajectory:
    """Return a trajectory cut to the number of its expert's turns plus a margin."""
    if expert is None or max_extra_turns is None:
        return trajectory
    return ending_at(trajectory, len(expert.turns) + max_extra_turns)


def _outcome(expert: Trajectory | None, rejected: Trajectory, threshold: float) -> str:
    if failed(rejected):
        return "failed"
    if expert is None:
        return "no_expert"
    check_comparable(expert, rejected)
    if not rejected.turns:
        return "no_turns"
    if actions_of(expert) == actions_of(rejected):
        return "identical"
    gap = expert.total_reward - rejected.total_reward
    if is_tie(gap):
        return "tie"
    if gap < 0:
        return "better_than_expert"
    return "kept" if exceeds(gap, threshold) else "gap"


def check_comparable(expert: Trajectory, explored: Trajectory) -> None:
    """Reject trajectories of two environments, whose rewards do not compare."""
    one, other = expert.environment, explored.environment
    if one and other and one != other:
        raise DataError(
            f"task {expert.task.id!r}: expected expert and explored trajectories of one environment, "
            f"got {one!r} and {other!r}, whose rewards do not compare. Record one of them again."
        )


def pair_ending(chosen: Trajectory, rejected: Trajectory, turn: int | None) -> PreferencePair:
    """Return the pair, whose sides end with a turn, if one is given."""
    if turn is None:
        return PreferencePair(chosen, rejected)
    return PreferencePair(ending_at(chosen, turn + 1), ending_at(rejected, turn + 1))


def paired_within_branches(
    inputs: RowInputs,
    pair: Callable[[Sequence[Trajectory], Sequence[Trajectory]], Paired],
    *,
    of_steps: bool = False,
) -> Paired:
    """Pair episodes with those that branch off from them, where their first turns fit the length limit of training.

    Args:
        inputs: Of the row maker.
        pair: From resumed episodes and their branches to pairs and counts.
        of_steps: Whether it counts steps of the resumed episodes, each in one pair at most; else memberships: of each
            branch one, and of an episode one for each turn at which it is resumed.

    Returns:
        The pairs, and counts; what does not fit is counted as `too_long`.
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
