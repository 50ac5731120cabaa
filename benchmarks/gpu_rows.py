"""Print rows of `benchmarks/gpu.py`, and time an online run, which several of its parts do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).parent


def say(
    what: str, case: str, ours: Any, theirs: Any = None, ratio: float | None = None, **detail: Any
) -> None:
    """Print one row."""
    row = {"what": what, "case": case, "ours": ours, "theirs": theirs, "ratio": ratio, "detail": detail}
    print(json.dumps({key: value for key, value in row.items() if value is not None}), flush=True)


def time_online(case: str, words: Sequence[str], python: str = sys.executable) -> None:
    """Run `gpu_online.yaml` in a process, and print a row with the mean seconds of each stage.

    Args:
        case: Name of the row.
        words: Overrides of the recipe.
        python: Interpreter that runs it.
    """
    path = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "perturn", "run", str(HERE / "gpu_online.yaml"), f"output={folder}"]
        began = time.perf_counter()
        done = subprocess.run(
            [*command, *words],
            capture_output=True,
            text=True,
            timeout=600,
            env=os.environ | {"PYTHONPATH": path},
        )
        wall = time.perf_counter() - began
        if done.returncode:
            sys.exit(done.stderr[-3000:] + done.stdout[-1000:])
        run = Path(folder) / "gpu_online"
        stages = json.loads((run / "manifest.json").read_text())["stages"]
        seconds: dict[str, list[float]] = {}
        for stage, found in stages.items():
            seconds.setdefault(stage.split("-")[0], []).append(found["seconds"])
        written = sum(file.stat().st_size for file in run.rglob("*.safetensors")) / 1e9
    say(
        "online run, s an iteration by stage",
        case,
        {kind: f"{mean(each):.1f}" for kind, each in seconds.items()},
        wall=round(wall, 1),
        gigabytes_of_weights=round(written, 2),
        stages=stages,
    )
