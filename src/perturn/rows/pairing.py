"""Trajectories into preference pairs.

An expert's over one that was explored, the best of a group, or of those that share their first turns, over its worst,
or a corrected failure over the failure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from perturn.errors import ConfigError, DataError
from perturn.remaining import wrong_turns
from perturn.types import PreferencePair, Trajectory, failed, succeeded

OUTCOMES = ("failed", "no_expert", "no_turns", "identical", "tie", "better_than_expert", "gap", "kept")
"""Outcomes of an explored trajectory: the first that holds."""

IN_GROUP = ("failed", "no_turns", "alone", "over", "identical", "tie", "gap", "kept")
"""Outcomes of a trajectory among those of its task; `over`: it would be in one pair more than asked for."""

CORRECTED = ("failed", "succeeded", "no_turns", "no_wrong_turn", "not_corrected", "identical", "gap", "kept")
"""Outcomes of an explored trajectory that may be corrected: the first that holds. `no_wrong_turn`: a limit of turns
ended it on its way; `not_corrected`: the expert did not succeed from there either."""

_ROUNDING = 1e-9
"""Rewards are sums and ratios of decimals: 0.81 - 0.41 is 0.4 plus 6e-17. Gaps this close are equal."""


def pair_with_expert(
    experts: Iterable[Trajectory],
    explored: Iterable[Trajectory],
    threshold: float = 0.4,
    *,
    max_extra_turns: int | None = None,
) -> tuple[list[PreferencePair], Counter[str]]:
    """Pair each explored trajectory with the expert's of its task, where the expert's is clearly better.

    A pair is kept if

        total_reward(expert) - total_reward(explored) > threshold,

    with differences of rounding error taken as none.

    Source: tlm-DRE, Appendix B (tau = 0.4), on the pairs of ETO: Song et al. 2024, "Trial and Error:
    Exploration-Based Trajectory Optimization for LLM Agents", arXiv:2403.02502.
    Differs: ETO has no threshold and, where the explored trajectory is the better one, makes it chosen; here
    that is counted and dropped, since the expert's is the distribution to learn.

    Args:
        experts: Trajectories of an expert. Of several of a task, the first with the highest total reward is
            taken; one that failed or has no turns is none.
        explored: Trajectories of the policy.
        threshold: tau, in units of total reward; finite and >= 0. 0 keeps every gap.
        max_extra_turns: Cut the rejected side to this many turns more than its expert has, from the end; its
            total reward stays that of the whole episode. ETO and DMPO take 5. None cuts nothing.

    Returns:
        The pairs in the order of `explored`, and counts: each explored trajectory under one of `OUTCOMES`,
        and beside these, under `cut`, how many of the kept ones were cut.
    """
    check_threshold(threshold)
    _check_extra_turns(max_extra_turns)
    best = best_by_task(experts)
    pairs: list[PreferencePair] = []
    counts = Counter(dict.fromkeys((*OUTCOMES, "cut"), 0))
    for trajectory in explored:
        expert = best.get(trajectory.task.id)
        rejected = _cut(trajectory, expert, max_extra_turns)
        outcome = _outcome(expert, rejected, threshold)
        counts[outcome] += 1
        if expert is not None and outcome == "kept":
            counts["cut"] += rejected is not trajectory
            pairs.append(PreferencePair(chosen=expert, rejected=rejected))
    return pairs, counts


def pair_within_groups(
    explored: Iterable[Trajectory], threshold: float = 0.4, *, per_group: int | None = 1
) -> tuple[list[PreferencePair], Counter[str]]:
    """Pair the best trajectory of each task with its worst, then the second best with the second worst, and so on.

    A pair is kept if total_reward(best) - total_reward(worst) > threshold, as in `pair_with_expert`. Of equal rewards
    the lower sample comes first.

    Source: ours, for online learning; the condition is that of tlm-DRE, Appendix B.
    Differs: the paper's chosen side is an expert's trajectory.

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
    return _pair_ranked(groups.values(), threshold, per_group)


def pair_within_branches(
    explored: Sequence[Trajectory],
    branches: Iterable[Trajectory],
    threshold: float = 0.4,
    *,
    per_group: int | None = 1,
    one_turn: bool = False,
) -> tuple[list[PreferencePair], Counter[str]]:
    """Pair the best of the episodes that share their first turns with the worst, and so on, as `pair_within_groups`.

    Those that were played on from one turn of an explored episode make a group, the explored one among them. So both
    sides have the turns before it in common; training keeps these or masks them, as `align.shared_prefix` says. Of one
    turn, the best is compared with those that took another one.

    Source: Lai et al. 2024, "Step-DPO", arXiv:2406.18629; Chen et al. 2024, "Advancing Tool-Augmented Large Language
    Models: Integrating Insights from Errors in Inference Trees" (TP-LLaMA), arXiv:2406.07115; both by their abstracts.
    Differs: who is better is known by how the episode ends, and not from a model of the process. Both papers compare
    one step, as `one_turn` does; by default both sides go on to the end. With episodes of an expert as `explored`, one
    step of his is compared with what the policy tried in its place (TP-LLaMA's expert searches a tree, and fails in it
    himself).

    Args:
        explored: Trajectories that are played on: the policy's, or an expert's.
        branches: Those that were played on from them.
        threshold: tau, in units of total reward; finite and >= 0.
        per_group: Pairs that share their first turns, at most; None: as many as there are, each trajectory in one.
        one_turn: Whether both sides end with the turn in which they part; their total rewards stay those of the whole
            episodes.

    Returns:
        The pairs, by explored episode, by turn and then by gap, largest first; and counts: each trajectory of a group
        under one of `IN_GROUP`, so that an explored one is counted as often as it was played on from another turn.
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
    pairs, counts = _pair_ranked(groups, threshold, per_group)
    counts["identical"] += alike
    return pairs, counts


def _unlike_best(group: Sequence[Trajectory]) -> list[Trajectory]:
    """The group without those that did what the best of it did; FAILED ones stay."""
    best = max((one for one in group if not failed(one)), key=lambda one: one.total_reward, default=None)
    return [
        one
        for one in group
        if best is None or one is best or failed(one) or actions_of(one) != actions_of(best)
    ]


def branches_of(
    explored: Sequence[Trajectory], branches: Iterable[Trajectory]
) -> list[dict[int, list[Trajectory]]]:
    """Episodes that were played on from each explored one, by the number of its turns that they begin with.

    Args:
        explored: Those, or the expert's where his are played on from.
        branches: Episodes that were played on from them.

    Raises:
        DataError: If one is of none of them.
    """
    found: dict[tuple[str, int | None], dict[int, list[Trajectory]]] = {one.key: {} for one in explored}
    for one in sorted(branches, key=lambda one: one.key):
        origin = found.get((one.task.id, one.origin))
        if origin is None:
            raise DataError(
                f"task {one.task.id!r:.80}, sample {one.sample}: expected an episode played on from one of this "
                f"task, got origin {one.origin}. Play the branches again."
            )
        origin.setdefault(one.taken_over, []).append(one)
    return [found[one.key] for one in explored]


def _pair_ranked(
    groups: Iterable[Sequence[Trajectory]], threshold: float, per_group: int | None
) -> tuple[list[PreferencePair], Counter[str]]:
    """Best over worst of each group; of equal rewards the first comes first."""
    check_threshold(threshold)
    if per_group is not None and per_group < 1:
        raise ConfigError(f"per_group must be >= 1 or None, got {per_group}.")
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


def to_correct(explored: Trajectory) -> int | None:
    """Number of turns of a failed episode before its first wrong one; None where there is nothing to correct.

    Raises:
        DataError: If its remaining path was not measured.
    """
    if failed(explored) or succeeded(explored):
        return None
    wrong = wrong_turns(explored)
    return wrong.index(True) if True in wrong else None


def pair_with_corrected(
    explored: Iterable[Trajectory],
    corrections: Iterable[Trajectory],
    threshold: float = 0.4,
    *,
    max_extra_turns: int | None = None,
    one_turn: bool = False,
) -> tuple[list[PreferencePair], Counter[str]]:
    """Pair each failed episode with what the expert made of it from its first wrong turn on.

    Both sides share the turns before it; training keeps these or masks them, as `align.shared_prefix` says. A pair is
    kept if the correction succeeds and total_reward(correction) - total_reward(explored) > threshold.

    Source: Lai et al. 2024, "Step-DPO: Step-wise Preference Optimization for Long-chain Reasoning of LLMs",
    arXiv:2406.18629 (the first wrong step against a right one, given what both share); and SCOPE, of "Recycling
    Failures: Salvaging Exploration in RLVR via Fine-Grained Off-Policy Guidance" (what follows the first error is
    replaced), both by their abstracts.
    Differs: both sides go on to the end of the episode, where Step-DPO compares one step, as `one_turn` does; the
    corrections are compared with the failures, where SCOPE learns from them as rollouts; the first error is known from
    the remaining path, and not from a model of the process. Step-DPO's right step is the policy's own; see
    `perturn.rows.drop_pairs.pair_right_with_wrong`.

    Args:
        explored: Trajectories of the policy, with the remaining path of their turns.
        corrections: Trajectories of the same tasks and samples, of those for which `to_correct` has a number.
        threshold: tau, in units of total reward; finite and >= 0.
        max_extra_turns: Cut the rejected side to this many turns more than its correction has, as in
            `pair_with_expert`.
        one_turn: Whether both sides end with the first wrong turn and the expert's in its place; their total rewards
            stay those of the whole episodes.

    Returns:
        The pairs in the order of `explored`, and counts: each explored trajectory under one of `CORRECTED`, and beside
        these, under `cut`, how many of the kept ones were cut.
    """
    check_threshold(threshold)
    _check_extra_turns(max_extra_turns)
    mended = {one.key: one for one in corrections if succeeded(one)}
    pairs: list[PreferencePair] = []
    counts = Counter(dict.fromkeys((*CORRECTED, "cut"), 0))
    for trajectory in explored:
        correction, rejected = mended.get(trajectory.key), trajectory
        if correction is not None and one_turn:
            turns = correction.taken_over + 1
            correction, rejected = ending_at(correction, turns), ending_at(trajectory, turns)
        outcome = _nothing_to_correct(trajectory) or _corrected(correction, rejected, threshold)
        counts[outcome] += 1
        if correction is not None and outcome == "kept":
            whole, rejected = rejected, _cut(rejected, correction, max_extra_turns)
            counts["cut"] += rejected is not whole
            pairs.append(PreferencePair(chosen=correction, rejected=rejected))
    return pairs, counts


def _nothing_to_correct(explored: Trajectory) -> str | None:
    """Why an explored trajectory is not corrected; None if it is to be."""
    if failed(explored):
        return "failed"
    if succeeded(explored):
        return "succeeded"
    if not explored.turns:
        return "no_turns"
    return "no_wrong_turn" if to_correct(explored) is None else None


def _corrected(correction: Trajectory | None, explored: Trajectory, threshold: float) -> str:
    if correction is None:
        return "not_corrected"
    _check_comparable(correction, explored)
    if actions_of(correction) == actions_of(explored):
        return "identical"
    gap = correction.total_reward - explored.total_reward
    return "kept" if exceeds(gap, threshold) else "gap"


def exceeds(gap: float, threshold: float) -> bool:
    """Whether a gap is larger, by more than rounding."""
    return gap - threshold > _ROUNDING


def is_tie(gap: float) -> bool:
    """Whether a gap is nothing but rounding."""
    return abs(gap) <= _ROUNDING


def _check_extra_turns(max_extra_turns: int | None) -> None:
    if max_extra_turns is not None and max_extra_turns < 0:
        raise ConfigError(f"max_extra_turns must be >= 0 or None, got {max_extra_turns}.")


def check_threshold(threshold: float) -> None:
    """Refuse a threshold that is no finite number >= 0.

    Raises:
        ConfigError: Saying so.
    """
    if not math.isfinite(threshold) or threshold < 0:
        raise ConfigError(f"threshold must be a finite number >= 0, got {threshold}.")


def best_by_task(experts: Iterable[Trajectory]) -> dict[str, Trajectory]:
    """Of each task the first with the highest total reward; one that FAILED or has no turns is none."""
    best: dict[str, Trajectory] = {}
    for expert in experts:
        if failed(expert) or not expert.turns:
            continue
        known = best.setdefault(expert.task.id, expert)
        if expert.total_reward > known.total_reward:
            best[expert.task.id] = expert
    return best


def _cut(trajectory: Trajectory, expert: Trajectory | None, max_extra_turns: int | None) -> Trajectory:
    if expert is None or max_extra_turns is None:
        return trajectory
    return ending_at(trajectory, len(expert.turns) + max_extra_turns)


def ending_at(trajectory: Trajectory, turns: int) -> Trajectory:
    """Its first so many turns, where it has more; its total reward stays that of the whole episode."""
    if len(trajectory.turns) <= turns:
        return trajectory
    return replace(trajectory, turns=trajectory.turns[:turns], terminated=False, truncated=True)


def _outcome(expert: Trajectory | None, rejected: Trajectory, threshold: float) -> str:
    if failed(rejected):
        return "failed"
    if expert is None:
        return "no_expert"
    _check_comparable(expert, rejected)
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


def actions_of(trajectory: Trajectory) -> list[object]:
    """Text and tool calls of each turn: native calls can differ where all texts are empty."""
    return [(turn.action.text, turn.action.tool_calls) for turn in trajectory.turns]


def _check_comparable(expert: Trajectory, explored: Trajectory) -> None:
    one, other = expert.environment, explored.environment
    if one and other and one != other:
        raise DataError(
            f"task {expert.task.id!r}: expected expert and explored trajectories of one environment, "
            f"got {one!r} and {other!r}, whose rewards do not compare. Record one of them again."
        )
