r"""Measure the memory of the local engine while it answers many conversations of varying lengths.

    python benchmarks/rollouts_memory.py --out benchmarks/rollouts_memory.json      half an hour on one core
    python benchmarks/rollouts_memory.py --quick                                    a tenth of the episodes

The models are Llamas of random weights with a vocabulary of 8192. At any time 16 conversations run, whose turns,
observations and greedy actions vary by half of their mean. Each row is one engine in its own process. It has the memory
of the process after each part of the episodes, minus the memory when the engine was ready, and the turns per second of
CPU time.
"""

from __future__ import annotations

import argparse
import json
import mmap
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from rollouts_sides import Shape, Words, load, make_scripts, play_with

from perturn.engines.local.engine import LocalEngine

SHAPE = Shape(conversations=500, turns=4, observation=24, action=4, spread=0.5, at_once=16)
"""Shape of one part. Parts differ in their seed."""
CASES = [
    ("0.9M", "float32", True, 8000),
    ("0.9M", "float32", False, 2000),
    ("0.9M", "bfloat16", True, 8000),
    ("15M", "float32", True, 3000),
    ("15M", "float32", False, 1000),
    ("15M", "bfloat16", True, 2000),
]
"""Model size, data type, whether weights are packed, and number of episodes."""


def measure(size: str, dtype: str, pack: bool, episodes: int) -> dict[str, Any]:
    """Return one row of the table."""
    engine = LocalEngine(load(size, dtype), Words(), pack=pack)
    ready, curve, turns, began = _held(), [], 0, time.process_time()
    for part in range(-(-episodes // SHAPE.conversations)):
        turns += play_with(engine, make_scripts(SHAPE, seed=part), SHAPE).turns
        curve.append(round((_held() - ready) / 1e6))
    return {
        "size": size,
        "dtype": dtype,
        "pack": pack,
        "episodes": len(curve) * SHAPE.conversations,
        "megabytes": curve,
        "turns_per_second": round(turns / (time.process_time() - began), 1),
        "threads": torch.get_num_threads(),
    }


def _held() -> int:
    """Return the memory in bytes that belongs only to this process."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def main() -> None:
    """Parse the options, run each case in its own process, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, help="file for the rows")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.case is not None:
        *case, episodes = CASES[words.case]
        print(json.dumps(measure(*case, episodes // 10 if words.quick else episodes)))
        return
    rows = []
    for number in range(len(CASES)):
        command = [sys.executable, __file__, "--case", str(number), *["--quick"] * words.quick]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows.append(json.loads(found))
        print(found.strip(), flush=True)
    if words.out:
        words.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
