"""Observe a long online run in failing environments: memory, descriptors, threads and throughput every ten seconds.

    python benchmarks/soak.py --place FOLDER --minutes 60 --out benchmarks/soak.parquet --figure docs/figures/soak.svg

Each step of an environment raises an error, hangs, exits, is killed, or returns garbage, with fixed probabilities.
`--out` gets a row for each sample. While it runs, the rows are lines of `samples.jsonl` in the folder. A second call
resumes the run, and appends lines. `--draw` draws the rows without running anything.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parent))

from kill_settings import COMMON, ONLINE, prepare
from small_svg import pyplot, save

FAILING = '''
import os
import random
import signal
import time

from perturn.types import Observation
from perturn_talk import Talk

RATES = {"raise": 0.02, "hang": 0.003, "exit": 0.01, "kill": 0.01, "nan": 0.01, "none": 0.01}


class Failing(Talk):
    """The same environment, each step of which may fail."""

    name = "failing-1.0"

    def step(self, action):
        drawn = random.SystemRandom().random()
        for kind, rate in RATES.items():
            if drawn < rate:
                return self.fail(kind)
            drawn -= rate
        return super().step(action)

    def fail(self, kind):
        if kind == "raise":
            raise RuntimeError("broken")
        if kind == "hang":
            time.sleep(1000)
        if kind == "exit":
            os._exit(3)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return Observation("fine", reward=float("nan")) if kind == "nan" else None
'''
_EVERY = 10.0
"""Time between two samples, in seconds."""
_WORDS = (
    "name=soak",
    "environment.name=perturn_failing:Failing",
    "deterministic=false",
    "worlds={processes: 4, retries: 1, step_seconds: 5, max_failed: 1}",
    "explore.per_iteration=4",
    "explore.samples=8",
    "evaluate=null",
    "iterations=1500",
)


def begin(place: Path) -> subprocess.Popen[bytes]:
    """Start or resume the run."""
    prepare(place)
    (place / "perturn_failing.py").write_text(FAILING)
    (place / "soak.yaml").write_text(COMMON + ONLINE)
    command = [sys.executable, "-m", "perturn", "run", "soak.yaml", *_WORDS]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PERTURN_CACHE": str(place / "cache")}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(place), os.environ.get("PYTHONPATH"))))
    with (place / "soak.log").open("ab") as log:
        return subprocess.Popen(
            command, cwd=place, env=variables, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )


class Episodes:
    """Counter of the stored episodes of a run."""

    def __init__(self, run: Path) -> None:
        """Start without counted episodes."""
        self._files, self._known = run / "trajectories", dict[str, Counter[str]]()

    def count(self) -> tuple[int, int, int]:
        """Return the numbers of iterations with episodes, of episodes, and of failed episodes."""
        files = sorted(self._files.glob("explore-*.jsonl"))
        for file in files:
            if file.name not in self._known or file in files[-2:]:
                rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
                self._known[file.name] = Counter(str(row["status"]) for row in rows)
        total: Counter[str] = sum(self._known.values(), Counter())
        return len(files), total.total(), total["failed"]


def sample(driver: psutil.Process) -> dict[str, Any]:
    """Return memory, descriptors and threads of the run's process, and of all its environments together."""
    found: dict[str, Any] = {
        "run": _figures([driver]),
        "environments": _figures(driver.children(recursive=True)),
    }
    times = driver.cpu_times()
    ended = times.children_user + times.children_system
    found["cpu_seconds"] = round(times.user + times.system + ended + found["environments"]["cpu_seconds"], 1)
    return found


def _figures(processes: Sequence[psutil.Process]) -> dict[str, Any]:
    found: Counter[str] = Counter()
    for process in processes:
        with suppress(psutil.Error, OSError), process.oneshot():
            times = process.cpu_times()
            found += Counter(
                processes=1,
                rss_mb=process.memory_info().rss // 2**20,
                descriptors=process.num_fds(),
                threads=process.num_threads(),
                cpu_ms=int(1000 * (times.user + times.system)),
            )
    names = ("processes", "rss_mb", "descriptors", "threads")
    return {name: found[name] for name in names} | {"cpu_seconds": found["cpu_ms"] / 1000}


def soak(place: Path, minutes: float) -> list[dict[str, Any]]:
    """Run, write a line every ten seconds, and return the rows of all calls."""
    out = place / "samples.jsonl"
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []
    before = rows[-1]["seconds"] if rows else 0.0
    call = rows[-1]["call"] + 1 if rows else 0
    process, began = begin(place), time.monotonic()
    driver, episodes = psutil.Process(process.pid), Episodes(place / "runs" / "soak")
    try:
        while process.poll() is None and before + time.monotonic() - began < 60 * minutes:
            time.sleep(_EVERY)
            with suppress(psutil.NoSuchProcess), out.open("a") as lines:
                seconds = round(before + time.monotonic() - began, 1)
                iterations, played, failed = episodes.count()
                row = {
                    "seconds": seconds,
                    "call": call,
                    "iterations": iterations,
                    "episodes": played,
                    "failed": failed,
                }
                print(json.dumps(row | sample(driver)), file=lines)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait()
    if process.returncode not in (0, 130):
        raise SystemExit(f"the run ended with {process.returncode}; see {place / 'soak.log'}")
    return [json.loads(line) for line in out.read_text().splitlines()]


def rates(rows: Sequence[dict[str, Any]], key: str, span: float = 180.0) -> list[tuple[float, float]]:
    """Return minutes, each with the episodes per unit of `key` in the last three minutes within the same call."""
    found = []
    for number, row in enumerate(rows):
        earlier = [
            each
            for each in rows[:number]
            if each["call"] == row["call"] and row["seconds"] - each["seconds"] <= span
        ]
        if earlier and row["seconds"] - earlier[0]["seconds"] >= 0.8 * span:
            passed, played = (row[name] - earlier[0][name] for name in (key, "episodes"))
            found.append((row["seconds"] / 60, played / passed))
    return found


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw the samples."""
    figure, axes = pyplot().subplots(1, 5, figsize=(16, 3), layout="constrained")
    minutes = [row["seconds"] / 60 for row in rows]
    for ax, (name, title) in zip(
        axes,
        {"rss_mb": "memory, MB", "descriptors": "descriptors", "threads": "threads"}.items(),
        strict=False,
    ):
        for role, label in (("run", "process of the run"), ("environments", "environments together")):
            ax.plot(minutes, [row[role][name] for row in rows], linewidth=0.8, label=label)
        ax.set_title(title)
    for ax, key, title in (
        (axes[3], "seconds", "episodes per second"),
        (axes[4], "cpu_seconds", "episodes per CPU second"),
    ):
        ax.plot(*zip(*rates(rows, key), strict=True), linewidth=0.8)
        ax.set_title(title)
    for ax in axes:
        ax.set_xlabel("minutes")
        ax.set_ylim(bottom=0)
    axes[0].legend(frameon=False)
    save(figure, file)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Compare the first and last thirds of the samples, after leaving out the first tenth."""
    rows = rows[len(rows) // 10 :]
    third = len(rows) // 3
    lines = [
        f"{rows[-1]['seconds'] / 60:.0f} minutes, {rows[-1]['episodes']} episodes, {rows[-1]['failed']} failed"
    ]
    for role in ("run", "environments"):
        for name in ("rss_mb", "descriptors", "threads"):
            first, last = (
                sorted(row[role][name] for row in part)[third * 95 // 100]
                for part in (rows[:third], rows[-third:])
            )
            lines.append(
                f"{role} {name}, 95 % of samples: at most {first} in the first third, {last} in the last"
            )
    for key in ("seconds", "cpu_seconds"):
        parts = [rows[:third], rows[-third:]]
        first, last = (
            (part[-1]["episodes"] - part[0]["episodes"]) / (part[-1][key] - part[0][key]) for part in parts
        )
        lines.append(f"episodes per {key}: {first:.2f} in the first third, {last:.2f} in the last")
    return "\n".join(lines)


def main() -> None:
    """Run for a total number of minutes, and draw the samples."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--place", type=Path, default=Path("soak"), help="folder to work in")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="minutes in total, with those of earlier calls"
    )
    parser.add_argument("--out", type=Path, required=True, help="Parquet file of the samples")
    parser.add_argument("--figure", type=Path, help="draw them here as SVG")
    parser.add_argument("--draw", action="store_true", help="draw what there is, and run nothing")
    options = parser.parse_args()
    if not options.draw:
        rows = soak(options.place.resolve(), options.minutes)
        pq.write_table(pa.Table.from_pylist(rows), options.out, compression="zstd")
    rows = pq.read_table(options.out).to_pylist()
    if options.figure:
        draw(rows, options.figure)
    print(summary(rows))


if __name__ == "__main__":
    main()
