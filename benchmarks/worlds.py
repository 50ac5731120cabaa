"""Measure the cost of a process around each environment, and how busy the driver keeps an engine.

    python benchmarks/worlds.py            sleeping, computing and cheap worlds
    python benchmarks/worlds.py --jvm      ScienceWorld: one JVM for all worlds, or one for each

The engine only sleeps: a call takes `--call` seconds for any number of prompts, and does not use the processor. So
turns per second show the cost of environments and driver, without a model. The output is one JSON object per line.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from perturn.config.sections import Section, Worlds
from perturn.envs.load_environment import environment_maker
from perturn.envs.world_process import ProcessWorlds
from perturn.episodes.play_many import Job, play
from perturn.types import Action, Environment, EpisodeProtocol, Observation, Sampling, Status, Task

TURNS = 10
KINDS = ["find-animal", "find-living-thing", "find-plant", "lifespan-longest-lived"]
WALK = ["look around", "inventory", "open door to hallway", "go to hallway", "open door to kitchen"]


class Sleeping:
    """Environment whose steps take 50 ms without using the processor."""

    name = "sleeping-1.0"

    def tasks(self, split: str) -> list[Task]:
        """Return more tasks than are played at once."""
        return [Task(f"t/{number}") for number in range(160)]

    def reset(self, task: Task, seed: int) -> Observation:
        """Return the first observation."""
        return Observation("begin")

    def step(self, action: str) -> Observation:
        """Sleep, and return an observation."""
        time.sleep(0.05)
        return Observation("go on")

    def close(self) -> None:
        """Do nothing."""


class Uneven(Sleeping):
    """Environment whose steps take a random time with a mean of 50 ms. An episode has 3 to 17 steps."""

    mean = 0.05

    def reset(self, task: Task, seed: int) -> Observation:
        """Draw the number of steps."""
        self.draw = random.Random(task.id)
        self.left = self.draw.randint(3, 17)
        return Observation("begin")

    def step(self, action: str) -> Observation:
        """Sleep, and return an observation."""
        time.sleep(self.draw.uniform(0, 2 * self.mean))
        self.left -= 1
        return Observation("go on", terminated=self.left == 0)


class Computing(Sleeping):
    """Environment whose steps take 5 ms of CPU time in Python."""

    name = "computing-1.0"

    def step(self, action: str) -> Observation:
        """Compute, and return an observation."""
        until = time.thread_time() + 0.005
        while time.thread_time() < until:
            sum(range(1000))
        return Observation("go on")


class Cheap(Sleeping):
    """Environment whose steps take no time."""

    name = "cheap-1.0"

    def step(self, action: str) -> Observation:
        """Return an observation at once."""
        return Observation("go on")


class Clock:
    """Engine that sleeps for a fixed time in each call."""

    name = "clock"

    def __init__(self, call: float) -> None:
        self.call, self.busy, self.calls, self.turns = call, 0.0, 0, 0

    def generate(self, prompts, sampling):
        began = time.monotonic()
        time.sleep(self.call)
        self.busy += time.monotonic() - began
        self.calls += 1
        self.turns += len(prompts)
        return [Action(f"Action: {WALK[len(prompt.turns) % len(WALK)]}") for prompt in prompts]

    def forget(self, conversation: str) -> None:
        pass


@contextmanager
def watched_memory() -> Iterator[list[float]]:
    """Record the peak memory of all descendant processes together, in GB."""
    peak, stop = [0.0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.2):
            sizes = []
            for each in psutil.Process().children(recursive=True):
                try:
                    sizes.append(each.memory_info().rss)
                except psutil.Error:
                    continue
            peak[0] = max(peak[0], sum(sizes) / 1e9)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def measure(section: Section, where: str, concurrency: int, call: float, episodes: int) -> None:
    """Play episodes, and print a row."""
    make: Callable[[], Environment]
    make = ProcessWorlds(section, Worlds()) if where == "processes" else environment_maker(section)
    lister = make()
    tasks = lister.tasks("train")
    lister.close()
    jobs = [Job(task, number) for number, task in enumerate(tasks[:: len(tasks) // episodes][:episodes])]
    protocol = EpisodeProtocol("clock", format="action", max_turns=TURNS)
    engine = Clock(call)
    with watched_memory() as peak:
        began = time.monotonic()
        found = list(
            play(jobs, engine, make, protocol=protocol, sampling=Sampling(), concurrency=concurrency)
        )
        seconds = time.monotonic() - began
    row = {
        "world": section["name"].partition(":")[2] or section["name"],
        "where": where,
        "at once": concurrency,
        "episodes": len(found),
        "failed": sum(one.status is Status.FAILED for one in found),
        "turns/s": round(engine.turns / seconds, 1),
        "turns a call": round(engine.turns / engine.calls, 1),
        "engine busy": round(engine.busy / seconds, 3),
        "memory of children, GB": round(peak[0], 2),
    }
    print(json.dumps(row), flush=True)


def measure_process() -> None:
    """Measure the start, the step and the memory of one process."""
    began = time.monotonic()
    world = ProcessWorlds({"name": f"{Path(__file__).resolve()}:Cheap"}, Worlds())()
    started = time.monotonic()
    world.reset(Task("t"), 0)
    for _ in range(5000):
        world.step("look around")
    stepped = time.monotonic()
    size = sum(each.memory_info().rss for each in psutil.Process().children()) / 1e6
    world.close()
    row = {
        "start, s": round(started - began, 3),
        "step, ms": round((stepped - started) / 5, 3),
        "memory, MB": round(size),
    }
    print(json.dumps(row), flush=True)


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jvm", action="store_true")
    parser.add_argument("--call", type=float, help="seconds of an engine call; 0.02, or 0.5 with --jvm")
    given = parser.parse_args()
    if given.jvm:
        shared = {"name": "scienceworld", "kinds": KINDS}
        own = shared | {"jvm_memory": "200m"}
        for section, where, count in ((shared, "threads", 16), (own, "processes", 4), (own, "processes", 16)):
            measure(section, where, count, given.call or 0.5, 48)
        return
    measure_process()
    for world in ("Sleeping", "Computing", "Cheap"):
        for where in ("threads", "processes"):
            measure({"name": f"{Path(__file__).resolve()}:{world}"}, where, 16, given.call or 0.02, 160)


if __name__ == "__main__":
    main()
