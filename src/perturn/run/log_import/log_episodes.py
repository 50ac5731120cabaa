"""Calls of one episode -> its trajectory, by the prefix rule of the recording endpoint."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from perturn.episodes.sequences import Cause, Sequences
from perturn.run.log_import.log_spool import Logged
from perturn.types import OPENS, Opening, Task, Trajectory, Turn

_LONGEST = 200
"""Characters of a task's id; a longer text is named by its digest."""


@dataclass(frozen=True)
class LoggedEpisode:
    """An episode of a log."""

    trajectory: Trajectory
    is_scored: bool
    """Whether any of its calls has the score."""
    sequences: int
    """How many sequences its turns are."""
    broke: Counter[Cause]
    """Why requests opened another sequence."""


def episode_of(calls: Sequence[Logged], environment: str, success_at: float | None) -> LoggedEpisode:
    """Return the episode of some calls, in the order in which they were made.

    The reward of a turn is the score of its call, and the total reward is their sum. The episode is a success if each
    of its scores is large enough.

    Args:
        calls: The calls, at least one.
        environment: Name of the format, for the trajectory.
        success_at: Least score of a success; None: above 0.
    """
    sequences = Sequences()
    turns: list[Turn] = []
    broke: Counter[Cause] = Counter()
    opening = Opening()
    for index, call in enumerate(calls):
        found = sequences.position(call.messages, call.tools)
        opens = found.follows == OPENS
        if opens and not index:
            opening = Opening(found.prompt, call.tools)
        turn = Turn(
            found.heard,
            call.action,
            reward=call.score or 0.0,
            follows=None if found.follows == index - 1 else found.follows,
            opening=Opening(found.prompt, call.tools) if opens and index else None,
        )
        turns.append(turn)
        sequences.add(found, call.said)
        if found.broke is not None:
            broke[found.broke.cause] += 1
    scores = [call.score for call in calls if call.score is not None]
    succeeded = [score > 0 if success_at is None else score >= success_at for score in scores]
    trajectory = Trajectory(
        Task(_task(calls[0])),
        tuple(turns),
        environment=environment,
        prompt=opening.prompt,
        tools=opening.tools,
        total_reward=sum(scores),
        success=bool(succeeded) and all(succeeded),
        truncated=not turns[-1].action.ended,
        policy=" + ".join(dict.fromkeys(str(call.held["model"]) for call in calls if call.held["model"]))[
            :_LONGEST
        ],
    )
    opened = sum(1 for turn in turns[1:] if turn.follows == OPENS)
    return LoggedEpisode(trajectory, bool(scores), 1 + opened, broke)


def _task(call: Logged) -> str:
    """Return the id of a task: the field that the log names, else a digest of the first user message."""
    if named := call.held["task"]:
        return str(named) if len(named) <= _LONGEST else _digest(str(named))
    asked = (str(each["content"]) for each in call.messages if each["role"] == "user")
    return f"log/{_digest(next(asked, ''))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
