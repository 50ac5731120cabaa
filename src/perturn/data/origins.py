"""Relate episodes of a task: branches of an episode, the best episode, and equal turns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from perturn.errors import DataError
from perturn.types import Trajectory, failed


def actions_of(trajectory: Trajectory) -> list[object]:
    """Return the text and the tool calls of each turn's action. Native calls can differ even if all texts are empty."""
    return [(turn.action.text, without_ids(turn.action.tool_calls)) for turn in trajectory.turns]


def exchanges_of(trajectory: Trajectory) -> list[tuple[object, object]]:
    """Return the observation and the action of each turn, without ids of tool calls."""
    heard = (list(map(_unnumbered, turn.observation)) for turn in trajectory.turns)
    return list(zip(heard, actions_of(trajectory), strict=True))


def _unnumbered(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without the ids of its tool calls and of the call that it answers."""
    plain = {key: value for key, value in said.items() if key != "tool_call_id"}
    return plain | ({"tool_calls": without_ids(plain["tool_calls"])} if plain.get("tool_calls") else {})


def digest(turns: Sequence[object]) -> bytes:
    """Return a digest of the turns that `actions_of` or `exchanges_of` returned."""
    text = json.dumps(turns, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def without_ids(calls: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tool calls without their ids. Servers choose ids at random, so equal calls have different ids."""
    return [{key: value for key, value in call.items() if key != "id"} for call in calls]


def best_by_task(experts: Iterable[Trajectory]) -> dict[str, Trajectory]:
    """Return, for each task, the episode with the highest total reward. FAILED and empty episodes do not count."""
    best: dict[str, Trajectory] = {}
    for expert in experts:
        if failed(expert) or not expert.turns:
            continue
        known = best.setdefault(expert.task.id, expert)
        if expert.total_reward > known.total_reward:
            best[expert.task.id] = expert
    return best


def ending_at(trajectory: Trajectory, turns: int) -> Trajectory:
    """Return a trajectory cut to at most `turns` turns. Its total reward stays the reward of the whole episode.

    The error that truncated the whole episode is left out; a FAILED episode keeps its error.
    """
    if len(trajectory.turns) <= turns:
        return trajectory
    error = trajectory.error if failed(trajectory) else None
    return replace(trajectory, turns=trajectory.turns[:turns], terminated=False, truncated=True, error=error)


def branches_of(
    explored: Sequence[Trajectory], branches: Iterable[Trajectory]
) -> list[dict[int, list[Trajectory]]]:
    """Return the branches of each explored episode, by the number of turns that a branch takes over from it.

    Args:
        explored: Explored episodes, or expert episodes if the branches start from these.
        branches: Episodes that branch from the explored episodes.

    Raises:
        DataError: If a branch starts from an episode that is missing.
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
