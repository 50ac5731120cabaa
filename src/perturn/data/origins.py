"""Origins of episodes: which episode branches from which, the best episode of a task, and shared turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from perturn.errors import DataError
from perturn.types import Trajectory, failed


def actions_of(trajectory: Trajectory) -> list[object]:
    """Return text and tool calls of each turn: native calls can differ where all texts are empty."""
    return [(turn.action.text, turn.action.tool_calls) for turn in trajectory.turns]


def best_by_task(experts: Iterable[Trajectory]) -> dict[str, Trajectory]:
    """Return the first episode of each task with the highest total reward; FAILED and empty episodes do not count."""
    best: dict[str, Trajectory] = {}
    for expert in experts:
        if failed(expert) or not expert.turns:
            continue
        known = best.setdefault(expert.task.id, expert)
        if expert.total_reward > known.total_reward:
            best[expert.task.id] = expert
    return best


def ending_at(trajectory: Trajectory, turns: int) -> Trajectory:
    """Return the trajectory with at most this number of turns; its total reward still counts the whole episode."""
    if len(trajectory.turns) <= turns:
        return trajectory
    return replace(trajectory, turns=trajectory.turns[:turns], terminated=False, truncated=True)


def branches_of(
    explored: Sequence[Trajectory], branches: Iterable[Trajectory]
) -> list[dict[int, list[Trajectory]]]:
    """Return branches of each explored episode, by the number of turns that they share with it.

    Args:
        explored: Explored episodes, or the expert's where branches start there.
        branches: Episodes that branch from them.

    Raises:
        DataError: If one is of none of them.
    """
    found: dict[tuple[str, int | None], dict[int, list[Trajectory]]] = {one.key: {} for one in explored}
    for one in sorted(branches, key=lambda one: one.key):
        origin = found.get((one.task.id, one.origin))
        if origin is None:
            raise DataError(
                f"task {one.task.id!r:.80}, sample {one.sample}: expected a branch of an episode of this "
                f"task, got origin {one.origin}. Play the branches again."
            )
        origin.setdefault(one.taken_over, []).append(one)
    return [found[one.key] for one in explored]
