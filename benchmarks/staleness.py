"""Measure the gain from `staleness` with a sleeping engine, environment and training, against the loop simulator.

    python benchmarks/staleness.py --out benchmarks/staleness.jsonl               all settings, about six minutes
    python benchmarks/staleness.py --simulate --out benchmarks/staleness.jsonl    the simulator alone, a second

Stages, rollouts, files and weight swaps are as in a real run, and only the model is missing. The benchmark prints a row
for each setting: the seconds of five iterations, the seconds expected by `perturn.estimate.loop_simulator`, and their
ratio. `stage_s` is the time of an empty stage, of which the simulator counts three per iteration.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.config.stages import stages
from perturn.data.run_folder import Run
from perturn.data.store import read_trajectories
from perturn.data.token_lag import lags
from perturn.estimate.loop_simulator import Loop, episode_turns, expected_seconds
from perturn.run.ahead import look_ahead
from perturn.run.session import Session
from perturn.run.stages.collect_stage import explore
from perturn.types import Action, Observation, Task

TASKS, SAMPLES, SLOTS, ITERATIONS = 4, 4, 8, 5
ANSWER, STEP = 0.12, 0.04
"""Median time of an answer, and time of a step, in seconds."""
ONE_ANSWER = 0.04
"""Median time of an answer in a replica that answers one prompt at a time, in seconds."""


class Sleeping:
    """Environment of two to six turns that sleeps in each step."""

    name = "sleeping-1.0"

    def tasks(self, split: str) -> list[Task]:
        """Return a few tasks."""
        return [Task(f"{split}/{number}", "", split) for number in range(TASKS)]

    def reset(self, task: Task, seed: int) -> Observation:
        """Begin an episode, whose length depends on the seed."""
        self.left = Random(seed).randint(2, 6)
        return Observation("go")

    def step(self, action: str) -> Observation:
        """Sleep, and return an observation."""
        time.sleep(STEP)
        self.left -= 1
        return Observation("on", reward=1.0, terminated=self.left == 0, success=True)

    def close(self) -> None:
        """Do nothing."""


class SleepingEngine:
    """Streaming engine with delayed answers. It answers prompts concurrently, or on replicas one after the other."""

    def __init__(self, sigma: float, replicas: int | None = None) -> None:
        self.name, self.version, self._sigma, self._open = "policy-0", None, sigma, []
        self._asked, self._free = 0, [0.0] * (replicas or 0)
        self._replica: dict[str, int] = {}

    def submit(self, prompts: Any, sampling: Any) -> None:
        """Accept prompts."""
        for prompt in prompts:
            self._asked += 1
            answer = ONE_ANSWER if self._free else ANSWER
            seconds = Random(prompt.seed).lognormvariate(math.log(answer), self._sigma)
            begins = time.monotonic()
            if self._free:  # a conversation stays with its replica, which first answers earlier prompts
                replica = self._replica.setdefault(prompt.conversation, len(self._replica) % len(self._free))
                begins = max(begins, self._free[replica])
                self._free[replica] = begins + seconds
            heapq.heappush(self._open, (begins + seconds, self._asked, prompt))

    def advance(self) -> list[Any]:
        """Wait briefly, and return the answers that are due."""
        time.sleep(min(0.005, max(0.0, self._open[0][0] - time.monotonic())))
        found, versions = [], () if self.version is None else (self.version,)
        while self._open and self._open[0][0] <= time.monotonic():
            prompt = heapq.heappop(self._open)[2]
            found.append((prompt, Action("Action: on", (1,), (-1.0,), versions=versions)))
        return found

    def swap_weights(self, folder: Any, name: str, version: int | None) -> None:
        """Change to a version of the weights."""
        self.name, self.version = name, version

    def update_weights(self, folder: Any, name: str) -> None:
        """Change the name of the policy."""
        self.name = name

    def generate(self, prompts: Any, sampling: Any) -> Any:
        """Raise an error, since a streaming engine does not use this."""
        raise NotImplementedError

    def forget(self, conversation: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class SleepingSession(Session):
    """Session without a model."""

    def __init__(self, run: Run, sigma: float, replicas: int | None = None) -> None:
        super().__init__(run)
        self._sleeping = SleepingEngine(sigma, replicas)

    def engine(self, policy: str) -> Any:
        """Return the engine for any policy."""
        self._sleeping.name = policy
        return self._sleeping

    def updated(self, policy: str, update: Any = None) -> bool:
        """Change to another policy."""
        (self._sleeping.update_weights if update is None else update)("", policy)
        return True

    def note_tokens(self, file: Path, policy: str) -> None:
        """Do nothing, since there is no tokenizer."""


@dataclass(frozen=True)
class Setting:
    """Setting of one row."""

    sigma: float
    train: float
    staleness: int
    replicas: int | None = None
    """Number of replicas that answer one prompt at a time. If None, a single engine answers all prompts
    concurrently."""


def measure(setting: Setting, folder: Path) -> tuple[float, int]:
    """Return the seconds of a run, and the largest lag of its tokens."""
    name = f"sleeping-{setting.sigma}-{setting.train}-{setting.staleness}-{setting.replicas}".replace(
        ".", "_"
    )
    recipe = parse(Recipe, _recipe(name, folder, setting.staleness))
    lag = 0
    with Run(recipe) as run, SleepingSession(run, setting.sigma, setting.replicas) as session:
        planned, began = stages(recipe), time.monotonic()
        for stage in planned:
            look_ahead(session, stage, planned)
            if stage.name.startswith("explore"):
                explore(session, stage)
                episodes = read_trajectories(run.paths.trajectories(stage.name))
                lag = max([lag, *(each for one in episodes for each in lags(one, stage.iteration - 1))])
            else:
                with run.stage(stage.name):
                    time.sleep(setting.train if stage.command == "train" else 0.0)
        return time.monotonic() - began, lag


def _recipe(name: str, folder: Path, staleness: int) -> dict[str, Any]:
    return {
        "name": name,
        "output": str(folder),
        "model": {"name": "tiny-agent"},
        "environment": {"name": f"{Path(__file__).stem}:Sleeping"},
        "protocol": {"name": "tiny", "format": "action", "system": "Go.", "max_turns": 9},
        "explore": {"samples": SAMPLES, "concurrency": SLOTS},
        "rows": {"name": "groups"},
        "align": {"loss": {"name": "ppo-clip"}, "minibatches": 1},
        "credit": {"name": "rloo"},
        "evaluate": None,
        "worlds": {"processes": 0},
        "iterations": ITERATIONS,
        "staleness": staleness,
    }


def stage_seconds(folder: Path) -> float:
    """Return the seconds of an empty stage, which writes notes and seals, under the current load."""
    with Run(parse(Recipe, _recipe(f"empty-{time.monotonic_ns()}", folder, 0))) as run:
        began = time.monotonic()
        for number in range(5):
            with run.stage(f"credit-{number:03d}"):
                pass
        return (time.monotonic() - began) / 5


def expected(setting: Setting, stage: float) -> float:
    """Return the seconds that the simulator expects for three stages per iteration."""
    several = {} if setting.replicas is None else {"replicas": setting.replicas, "at_once": 1}
    train, answer = setting.train + 3 * stage, ANSWER if setting.replicas is None else ONE_ANSWER
    loop = Loop(ITERATIONS, TASKS * SAMPLES, SLOTS, train, setting.staleness, **several)
    episode = episode_turns(
        lambda random: random.randint(2, 6),
        lambda random: random.lognormvariate(math.log(answer), setting.sigma),
        lambda random: STEP,
    )
    return expected_seconds(loop, episode)


def rows(settings: Sequence[Setting], simulate: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each setting. If `simulate`, nothing is measured, and an empty stage takes no time."""
    with tempfile.TemporaryDirectory() as folder:
        for setting in settings:
            stage = 0.0 if simulate else stage_seconds(Path(folder))
            theirs = expected(setting, stage)
            row = asdict(setting) | {"stage_s": round(stage, 3), "simulated_s": round(theirs, 2)}
            if not simulate:
                seconds, lag = measure(setting, Path(folder))
                measured = {"measured_s": round(seconds, 2), "ratio": round(seconds / theirs, 3)}
                row |= measured | {"largest_lag": lag}
            yield row


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="two settings")
    parser.add_argument("--replicas", action="store_true", help="settings of replicas alone")
    parser.add_argument("--simulate", action="store_true", help="measure nothing; empty stages take no time")
    parser.add_argument("--out", type=Path, help="file to which the rows are appended, as JSON lines")
    options = parser.parse_args()
    sigmas = (0.0, 0.7)
    alone = [Setting(sigma, train, k) for sigma in sigmas for train in (0.5, 1.5) for k in (0, 1, 2, 4)]
    several = [Setting(sigma, 0.5, k, replicas) for sigma in sigmas for replicas in (1, 2, 4) for k in (0, 1)]
    settings = several if options.replicas else [*alone, *several]
    for row in rows(settings[:2] if options.quick else settings, options.simulate):
        print(json.dumps(row), flush=True)
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
