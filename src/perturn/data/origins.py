"""Which episodes branch off from which, which of a task is the best, and what two of them have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from perturn.errors import DataError
from perturn.types import Trajectory, failed


def actions_of(trajectory: Trajectory) -> list[object]:
    """Text and tool calls of each turn: native calls can differ where all texts are empty."""
    return [(turn.action.text, turn.action.tool_calls) for turn in trajectory.turns]


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


def ending_at(trajectory: Trajectory, turns: int) -> Trajectory:
    """Its first so many turns, where it has more; its total reward stays that of the whole episode."""
    if len(trajectory.turns) <= turns:
        return trajectory
    return replace(trajectory, turns=trajectory.turns[:turns], terminated=False, truncated=True)


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
