"""What `staleness` gains, with an engine, an environment and a training that sleep, and what the simulator says of it.

    python benchmarks/staleness.py [--quick] [--replicas]

The stages, plays, files and swaps are those of a run; only the model is not there. Prints a row for each setting:
seconds of five iterations, those that `perturn.estimate.loop_simulator` expects, and their ratio.
"""

from __future__ import annotations

import argparse
import heapq
import math
import tempfile
import time
from dataclasses import dataclass
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
"""Median seconds of an answer, and seconds of a step."""
ONE_ANSWER = 0.04
"""Median seconds of an answer of a replica that answers one at a time."""


class Sleeping:
    """An environment of two to six turns that sleeps in each step."""

    name = "sleeping-1.0"

    def tasks(self, split: str) -> list[Task]:
        """A few tasks."""
        return [Task(f"{split}/{number}", "", split) for number in range(TASKS)]

    def reset(self, task: Task, seed: int) -> Observation:
        """Begin an episode; its seed says how long it is."""
        self.left = Random(seed).randint(2, 6)
        return Observation("go")

    def step(self, action: str) -> Observation:
        """Sleep."""
        time.sleep(STEP)
        self.left -= 1
        return Observation("on", reward=1.0, terminated=self.left == 0, success=True)

    def close(self) -> None:
        """Hold nothing."""


class SleepingEngine:
    """A streaming engine whose answers each take their time, beside each other or on replicas one after the other."""

    def __init__(self, sigma: float, replicas: int | None = None) -> None:
        self.name, self.version, self._sigma, self._open = "policy-0", None, sigma, []
        self._asked, self._free = 0, [0.0] * (replicas or 0)
        self._replica: dict[str, int] = {}

    def submit(self, prompts: Any, sampling: Any) -> None:
        """Take prompts on."""
        for prompt in prompts:
            self._asked += 1
            answer = ONE_ANSWER if self._free else ANSWER
            seconds = Random(prompt.seed).lognormvariate(math.log(answer), self._sigma)
            begins = time.monotonic()
            if self._free:  # its conversation stays with a replica, which has answers to give before
                replica = self._replica.setdefault(prompt.conversation, len(self._replica) % len(self._free))
                begins = max(begins, self._free[replica])
                self._free[replica] = begins + seconds
            heapq.heappush(self._open, (begins + seconds, self._asked, prompt))

    def advance(self) -> list[Any]:
        """Wait for a moment; what is answered."""
        time.sleep(min(0.005, max(0.0, self._open[0][0] - time.monotonic())))
        found, versions = [], () if self.version is None else (self.version,)
        while self._open and self._open[0][0] <= time.monotonic():
            prompt = heapq.heappop(self._open)[2]
            found.append((prompt, Action("Action: on", (1,), (-1.0,), versions=versions)))
        return found

    def swap_weights(self, folder: Any, name: str, version: int | None) -> None:
        """Go over to a version."""
        self.name, self.version = name, version

    def update_weights(self, folder: Any, name: str) -> None:
        """Take another name."""
        self.name = name

    def generate(self, prompts: Any, sampling: Any) -> Any:
        """Nobody asks."""
        raise NotImplementedError

    def forget(self, conversation: str) -> None:
        """Hold nothing."""

    def close(self) -> None:
        """Hold nothing."""


class SleepingSession(Session):
    """A session without a model."""

    def __init__(self, run: Run, sigma: float, replicas: int | None = None) -> None:
        super().__init__(run)
        self._sleeping = SleepingEngine(sigma, replicas)

    def engine(self, policy: str) -> Any:
        """The engine, whatever policy is asked for."""
        self._sleeping.name = policy
        return self._sleeping

    def updated(self, policy: str, update: Any = None) -> bool:
        """Take another policy."""
        (self._sleeping.update_weights if update is None else update)("", policy)
        return True

    def note_tokens(self, file: Path, policy: str) -> None:
        """There is no tokenizer."""


@dataclass(frozen=True)
class Setting:
    """One row."""

    sigma: float
    train: float
    staleness: int
    replicas: int | None = None
    """That answer one at a time; None: one engine that answers all beside each other."""


def measure(setting: Setting, folder: Path) -> tuple[float, int]:
    """Seconds of a run, and the largest lag of its tokens."""
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
    """Seconds of a stage without work: notes and seals on this disk, under the load of now."""
    with Run(parse(Recipe, _recipe(f"empty-{time.monotonic_ns()}", folder, 0))) as run:
        began = time.monotonic()
        for number in range(5):
            with run.stage(f"credit-{number:03d}"):
                pass
        return (time.monotonic() - began) / 5


def expected(setting: Setting, stage: float) -> float:
    """Seconds that the simulator expects, of three stages an iteration."""
    several = {} if setting.replicas is None else {"replicas": setting.replicas, "at_once": 1}
    train, answer = setting.train + 3 * stage, ANSWER if setting.replicas is None else ONE_ANSWER
    loop = Loop(ITERATIONS, TASKS * SAMPLES, SLOTS, train, setting.staleness, **several)
    episode = episode_turns(
        lambda random: random.randint(2, 6),
        lambda random: random.lognormvariate(math.log(answer), setting.sigma),
        lambda random: STEP,
    )
    return expected_seconds(loop, episode)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="two settings")
    parser.add_argument("--replicas", action="store_true", help="settings of replicas alone")
    options = parser.parse_args()
    sigmas = (0.0, 0.7)
    alone = [Setting(sigma, train, k) for sigma in sigmas for train in (0.5, 1.5) for k in (0, 1, 2)]
    several = [Setting(sigma, 0.5, k, replicas) for sigma in sigmas for replicas in (1, 2, 4) for k in (0, 1)]
    settings = several if options.replicas else [*alone, *several]
    print("sigma  train  staleness  replicas  measured  simulated  ratio  largest lag")
    with tempfile.TemporaryDirectory() as folder:
        for setting in settings[:2] if options.quick else settings:
            stage = stage_seconds(Path(folder))
            seconds, lag = measure(setting, Path(folder))
            theirs = expected(setting, stage)
            print(
                f"{setting.sigma:5.1f}  {setting.train:5.1f}  {setting.staleness:9d}  {setting.replicas or 'all':>8}  "
                f"{seconds:7.2f}s  {theirs:8.2f}s  "
                f"{seconds / theirs:5.2f}  {lag:11d}",
                flush=True,
            )


if __name__ == "__main__":
    main()
