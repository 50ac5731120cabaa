"""Reading stored episodes: the store's readers against strict pydantic adapters, alternated in one process.

    python benchmarks/reading.py [EPISODES]

The adapters check what the store checks of a value, and build dataclasses alike; they read JSON themselves, and do not
say what is wrong in the store's words. 10,000 episodes of 15 turns on one shared core: store 7.1 s, adapters 2.5 s,
median ratio 0.35.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import field
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass as checked

from perturn.data.store import trajectory_from_dict, trajectory_to_dict
from perturn.io.plain import fault
from perturn.types import Action, Task, Trajectory, Turn

_STRICT = ConfigDict(strict=True, extra="forbid")
Count = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


def _sound(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse data that would not come back from JSON as it went in."""
    if problem := fault(value, "data", halves=False):
        raise ValueError(problem)
    return value


Data = Annotated[dict[str, Any], AfterValidator(_sound)]
Rows = tuple[Data, ...]


@checked(frozen=True, config=_STRICT)
class _Task:
    id: str
    kind: str = ""
    split: str = "train"
    data: Data = field(default_factory=dict)


@checked(frozen=True, config=_STRICT)
class _Action:
    text: str
    token_ids: tuple[Count, ...] | None = None
    logprobs: tuple[Finite, ...] | None = None
    ended: bool = True
    tool_calls: Rows = ()


@checked(frozen=True, config=_STRICT)
class _Turn:
    observation: Rows
    action: _Action
    reward: Finite = 0.0
    valid: bool = True
    state_key: str | None = None


@checked(frozen=True, config=_STRICT)
class _Trajectory:
    version: int
    task: _Task
    turns: tuple[_Turn, ...]
    environment: str = ""
    protocol: str = ""
    prompt: Rows = ()
    tools: Rows = ()
    total_reward: Finite = 0.0
    success: bool = False
    terminated: bool = False
    truncated: bool = False
    status: str = "completed"
    error: str | None = None
    sample: Count = 0
    seed: int = 0
    policy: str = ""
    history: int | None = None


def episode(number: int, turns: int = 15, tokens: int = 12) -> Trajectory:
    """An episode as an engine records it."""
    played = tuple(
        Turn(
            ({"role": "user", "content": f"You are in room {turn}. You see a lamp and a door. " * 3},),
            Action("Thought: go on.\nAction: open door", tuple(range(tokens)), (-0.25,) * tokens),
            state_key=f"{number}-{turn}",
        )
        for turn in range(turns)
    )
    return Trajectory(Task(f"t/{number}", data={"seed": number}), played, total_reward=0.5)


def seconds(read: Callable[[Any], object], lines: list[bytes]) -> float:
    """Time to read all lines."""
    began = time.perf_counter()
    for line in lines:
        read(line)
    return time.perf_counter() - began


def main() -> None:
    """Print the median seconds of both and their ratio."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    lines = [json.dumps(trajectory_to_dict(episode(number))).encode() for number in range(count)]
    adapter = TypeAdapter(_Trajectory)
    times = [
        (
            seconds(lambda line: trajectory_from_dict(json.loads(line)), lines),
            seconds(adapter.validate_json, lines),
        )
        for _ in range(5)
    ]
    ours, pydantic = (statistics.median(each) for each in zip(*times, strict=True))
    ratio = statistics.median(other / one for one, other in times)
    print(f"{count} episodes: store {ours:.2f} s, pydantic {pydantic:.2f} s, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
