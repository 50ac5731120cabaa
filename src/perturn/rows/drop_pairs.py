"""Turns of an explored episode against others from the same turn on: by the way that is left, or by their worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from perturn.errors import DataError
from perturn.rows.pairing import IN_GROUP, actions_of, branches_of, check_threshold, ending_at, exceeds
from perturn.types import PreferencePair, Trajectory, failed, score

DROPS = ("failed", "no_drop", "identical", "gap", "kept")
"""Outcomes of a step of an explored episode: the first that holds. `failed`: no branch says what it was worth to be
before it, or after it; `no_drop`: that is not clearly less; `identical`: no branch that ended took another step; `gap`:
none of those that did ended clearly better."""


def pair_right_with_wrong(
    explored: Sequence[Trajectory],
    branches: Iterable[Trajectory],
    *,
    per_group: int | None = 1,
    one_turn: bool = False,
) -> tuple[list[PreferencePair], Counter[str]]:
    """Pair turns that bring the success nearer with turns that do not, among episodes that share those before.

    Those that were played on from one turn of an explored episode make a group, the explored one among them. The one
    with the highest total reward whose next turn is right is chosen over the one with the lowest whose next turn is
    wrong, and so on; of equal rewards the first, and the explored one comes before its branches.

    Source: Lai et al. 2024, "Step-DPO: Step-wise Preference Optimization for Long-chain Reasoning of LLMs",
    arXiv:2406.18629, by its abstract.
    Differs: a turn is right where it shortens the way to a success, and not by the judgment of a model.

    Args:
        explored: Trajectories that are played on, with the remaining path of their turns.
        branches: Those that were played on from them, measured too; FAILED ones need not be.
        per_group: Pairs that share their first turns, at most; None: as many as there are, each trajectory in one.
        one_turn: Whether both sides end with the turn in which they part.

    Returns:
        The pairs, by explored episode, by turn and then by rank; and counts: each trajectory of a group under one of
        `IN_GROUP`, so that an explored one is counted as often as it was played on from another turn.

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
                    pairs.append(_pair(best, worst, turn if one_turn else None))
    return pairs, counts


def pair_where_worth_drops(
    explored: Sequence[Trajectory],
    branches: Iterable[Trajectory],
    threshold: float = 0.4,
    *,
    one_turn: bool = False,
) -> tuple[list[PreferencePair], Counter[str]]:
    """Pair each step of an explored episode that cost it its chances with a better one from the same turn.

    A step is what the episode did from one turn that is played on from to the next. It gives a pair if

        v(t) - v(t') > threshold,    v(t) = mean score of the branches from turn t,

    where t' is the turn after the step, and v after the last step is what the episode earned: the best of the branches
    from turn t that took another step over the episode, if that earned more than it by the threshold too.

    Source: Setlur et al. 2024, "RL on Incorrect Synthetic Data Scales the Efficiency of LLM Math Reasoning by
    Eight-Fold", arXiv:2406.14532, by its abstract: the advantage of each step of a failure tells which are rejected.
    Differs: what is chosen, how many branches say what a turn is worth, and the threshold are ours.

    Args:
        explored: Trajectories of the policy.
        branches: Those that were played on from them. Those that FAILED are left out, since the
            environment or the engine broke them off: they say nothing of what a turn is worth.
        threshold: tau, in units of total reward; finite and >= 0.
        one_turn: Whether both sides end with the turn in which they part, where a step is one turn.

    Returns:
        The pairs, by explored episode and turn; and counts: each step under one of `DROPS`.
    """
    check_threshold(threshold)
    pairs: list[PreferencePair] = []
    counts = Counter(dict.fromkeys(DROPS, 0))
    for one, by_turn in zip(explored, branches_of(explored, branches), strict=True):
        for turn, after in _steps(one, by_turn):
            outcome, better = _compare(one, turn, after, by_turn, threshold, one_turn=one_turn)
            counts[outcome] += 1
            if better is not None:
                pairs.append(_pair(better, one, turn if one_turn else None))
    return pairs, counts


def _steps(one: Trajectory, by_turn: Mapping[int, object]) -> Iterator[tuple[int, int]]:
    """Turns between which the steps of an episode are: from one that is played on from to the next, or to the end."""
    return pairwise([*sorted(by_turn), len(one.turns)])


def _compare(
    one: Trajectory,
    turn: int,
    after: int,
    by_turn: Mapping[int, Sequence[Trajectory]],
    threshold: float,
    *,
    one_turn: bool,
) -> tuple[str, Trajectory | None]:
    """Outcome of an episode's step from a turn to another, and the branch that is preferred to it, if one is."""
    there, beyond = (
        [each for each in by_turn.get(at, ()) if len(each.turns) > at and not failed(each)]
        for at in (turn, after)
    )
    is_last = after == len(one.turns)
    if not there or not (beyond or is_last):
        return "failed", None
    left = score(one) if is_last else fmean(map(score, beyond))
    if not exceeds(fmean(map(score, there)) - left, threshold):
        return "no_drop", None
    taken = slice(turn, turn + 1 if one_turn else after)
    step = actions_of(one)[taken]
    others = [each for each in there if actions_of(each)[taken] != step]
    if not others:
        return "identical", None
    best = max(others, key=score)
    return ("kept", best) if exceeds(score(best) - score(one), threshold) else ("gap", None)


def _is_wrong(one: Trajectory, turn: int) -> bool:
    """Whether a turn brought the success no nearer."""
    remaining = one.turns[turn].remaining
    if remaining is None:
        raise DataError(
            f"task {one.task.id!r:.80}, sample {one.sample}: turns[{turn}].remaining was not measured; set "
            "pair.remaining to shortest or searching."
        )
    return remaining.is_wrong


def _pair(chosen: Trajectory, rejected: Trajectory, turn: int | None) -> PreferencePair:
    """The pair, whose sides end with a turn, if one is given."""
    if turn is None:
        return PreferencePair(chosen, rejected)
    return PreferencePair(ending_at(chosen, turn + 1), ending_at(rejected, turn + 1))
