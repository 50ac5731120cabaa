"""Outcomes of stored episodes, read without their texts, so that thousands of episodes can be shown quickly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from perturn.data.run_files import REMEDY
from perturn.errors import RunError
from perturn.io.read_input import complete_lines, explain
from perturn.types import Trajectory, failed, filled_context, succeeded, unfinished

_Finite = Annotated[float, Field(ge=-1e300, le=1e300, allow_inf_nan=False)]


class _Task(TypedDict):
    id: str
    kind: NotRequired[str]


class _Action(TypedDict):
    logprobs: NotRequired[list[_Finite] | None]


class _Turn(TypedDict):
    action: _Action
    valid: NotRequired[bool]


class _Line(TypedDict):
    """The keys of a stored trajectory that are read here; `perturn.data.store` reads the whole trajectory."""

    task: _Task
    turns: NotRequired[list[_Turn]]
    total_reward: NotRequired[_Finite]
    success: NotRequired[bool]
    status: NotRequired[Literal["completed", "failed", "unfinished"]]
    policy: NotRequired[str]
    origin: NotRequired[int | None]
    taken_over: NotRequired[int]


class _Start(TypedDict):
    """The key that `read_tasks` reads."""

    task: _Task


_LINE, _START = TypeAdapter(_Line), TypeAdapter(_Start)


@dataclass(frozen=True)
class Outcome:
    """Outcome of one episode, in numbers."""

    task: str
    score: float
    """Total reward; 0 for a FAILED episode."""
    success: bool
    failed: bool
    turns: int
    invalid: int
    """Number of turns whose action broke the format, or was not understood by the environment."""
    surprise: float | None
    """Mean negative log-probability, in nats, of the tokens sampled in the episode's own turns; None if not
    recorded."""
    policy: str
    """Name of the policy that played the episode, with a digest of its weights."""
    kind: str = ""
    """Kind of the task."""
    unfinished: bool = False
    """Whether the episode continues in the next iteration, so that its score and success are not final."""


def read_outcomes(file: Path) -> list[Outcome]:
    """Return the outcomes in a file of trajectories; an empty list if the file does not exist.

    Raises:
        RunError: If a complete line is not a trajectory.
    """
    if not file.exists():
        return []
    return [parse_outcome(raw, f"{file}:{number}") for number, raw in complete_lines(file, RunError, REMEDY)]


def read_tasks(file: Path) -> set[str]:
    """Return the ids of the tasks in a file of trajectories, which may be missing. Turns are not parsed.

    Raises:
        RunError: If a complete line is not JSON or has no task.
    """
    lines = complete_lines(file, RunError, REMEDY) if file.exists() else ()
    return {_parse(_START, raw, f"{file}:{number}")["task"]["id"] for number, raw in lines}


def parse_outcome(raw: bytes, where: str) -> Outcome:
    """Return the outcome of a line in a file of trajectories.

    Raises:
        RunError: If the line is not a trajectory.
    """
    row = _parse(_LINE, raw, where)
    failed = row.get("status") == "failed"
    turns = row.get("turns", [])
    own = 0 if row.get("origin") is None else row.get("taken_over", 0)
    logprobs = [each for turn in turns[own:] for each in turn["action"].get("logprobs") or ()]
    return Outcome(
        task=row["task"]["id"],
        score=0.0 if failed else row.get("total_reward", 0.0),
        success=row.get("success", False) and not failed,
        failed=failed,
        turns=len(turns),
        invalid=sum(not turn.get("valid", True) for turn in turns),
        surprise=-sum(logprobs) / len(logprobs) if logprobs else None,
        policy=row.get("policy", ""),
        kind=row["task"].get("kind", ""),
        unfinished=row.get("status") == "unfinished",
    )


def _parse(shape: TypeAdapter[Any], raw: bytes, where: str) -> Any:
    try:
        return shape.validate_json(raw, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        said = first["msg"] if first["type"] == "json_invalid" else explain(first)
        raise RunError(f"{where}: not a trajectory: {said}. {REMEDY}") from error


def outcomes(trajectories: Iterable[Trajectory]) -> dict[str, int]:
    """Count episodes by outcome, and sum their turns and tokens.

    The keys `unfinished` and `filled_context` (truncated by the model's context) exist only if they are not 0.
    """
    counts: Counter[str] = Counter(episodes=0, success=0, failed=0, turns=0, invalid_turns=0)
    for one in trajectories:
        counts["episodes"] += 1
        counts["success"] += succeeded(one)
        counts["failed"] += failed(one)
        counts["turns"] += len(one.turns)
        counts["invalid_turns"] += sum(not turn.valid for turn in one.turns)
        counts["action_tokens"] += sum(len(turn.action.token_ids or ()) for turn in one.turns)
        if unfinished(one):
            counts["unfinished"] += 1
        if filled_context(one):
            counts["filled_context"] += 1
    return dict(counts)
