"""Trajectories into preference pairs: an expert's over one that was explored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from perturn.errors import ConfigError, DataError
from perturn.types import PreferencePair, Trajectory, failed

OUTCOMES = ("failed", "no_expert", "no_turns", "identical", "tie", "better_than_expert", "gap", "kept")
"""Outcomes of an explored trajectory: the first that holds."""

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
    if not math.isfinite(threshold) or threshold < 0:
        raise ConfigError(f"threshold must be a finite number >= 0, got {threshold}.")
    if max_extra_turns is not None and max_extra_turns < 0:
        raise ConfigError(f"max_extra_turns must be >= 0 or None, got {max_extra_turns}.")
    best = _best_by_task(experts)
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


def _best_by_task(experts: Iterable[Trajectory]) -> dict[str, Trajectory]:
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
    limit = len(expert.turns) + max_extra_turns
    if len(trajectory.turns) <= limit:
        return trajectory
    return replace(trajectory, turns=trajectory.turns[:limit], terminated=False, truncated=True)


def _outcome(expert: Trajectory | None, rejected: Trajectory, threshold: float) -> str:
    if failed(rejected):
        return "failed"
    if expert is None:
        return "no_expert"
    _check_comparable(expert, rejected)
    if not rejected.turns:
        return "no_turns"
    if _actions(expert) == _actions(rejected):
        return "identical"
    gap = expert.total_reward - rejected.total_reward
    if abs(gap) <= _ROUNDING:
        return "tie"
    if gap < 0:
        return "better_than_expert"
    return "kept" if gap - threshold > _ROUNDING else "gap"


def _actions(trajectory: Trajectory) -> list[object]:
    """Text and tool calls of each turn: native calls can differ where all texts are empty."""
    return [(turn.action.text, turn.action.tool_calls) for turn in trajectory.turns]


def _check_comparable(expert: Trajectory, explored: Trajectory) -> None:
    one, other = expert.environment, explored.environment
    if one and other and one != other:
        raise DataError(
            f"task {expert.task.id!r}: expected expert and explored trajectories of one environment, "
            f"got {one!r} and {other!r}, whose rewards do not compare. Record one of them again."
        )
