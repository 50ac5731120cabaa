"""Reading stored episodes: the store against `json.loads` of the same lines, which checks nothing, in turn.

    python benchmarks/reading.py [EPISODES]

10,000 episodes of 15 turns on a shared core: store 0.88 s, json 0.54 s, ratio 1.6 (1.7 where other work runs). The
readers before these, functions of Python a field, took 3.5 s: 0.25 of it is left.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from perturn.data.records import trajectory_to_dict
from perturn.data.store import read_trajectories
from perturn.types import Action, Task, Trajectory, Turn


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


def seconds(reading: Iterable[object]) -> float:
    """Time to read to the end, keeping nothing."""
    began = time.perf_counter()
    deque(reading, maxlen=0)
    return time.perf_counter() - began


def main() -> None:
    """Print the median seconds of both and their ratio."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "episodes.jsonl"
        with file.open("w") as opened:
            opened.writelines(json.dumps(trajectory_to_dict(episode(each))) + "\n" for each in range(count))
        times = [
            (seconds(read_trajectories(file)), seconds(map(json.loads, file.open("rb")))) for _ in range(5)
        ]
    store, plain = (statistics.median(each) for each in zip(*times, strict=True))
    ratio = statistics.median(ours / other for ours, other in times)
    print(f"{count} episodes: store {store:.2f} s, json {plain:.2f} s, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
