"""Compare reading stored episodes with `json.loads` of the same lines, which validates nothing.

    python benchmarks/reading.py [EPISODES]

For 10,000 episodes of 15 turns on a shared core, the store took 0.88 s and json 0.54 s, a ratio of 1.6 (1.7 beside
other work). An earlier reader, with a Python function for each field, took 3.5 s.
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
    """Return an episode in the form in which an engine records it."""
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
    """Return the seconds of reading to the end, without keeping the items."""
    began = time.perf_counter()
    deque(reading, maxlen=0)
    return time.perf_counter() - began


def main() -> None:
    """Print the median seconds of both, and their ratio."""
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
