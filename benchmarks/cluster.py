"""Measure the cost of a call through Ray, and how the speed of collecting grows with the nodes of a cluster.

    python benchmarks/cluster.py           turns a second in this process and on 1 and 2 nodes
    python benchmarks/cluster.py --json    one JSON object a row
    python benchmarks/cluster.py --quick   one and two nodes alone, by a driver that is a member of the cluster

All nodes are on this machine. So the benchmark shows the overhead of Ray, and that its nodes work in parallel. It does
not show the gain of more processors, or the cost of a network. For this reason, engines and environments only sleep.
Two engines represent two limits of a model:

- `Clock` answers one prompt after the other, each in `--call` seconds, like a model that is saturated by one prompt. So
  two replicas are at most twice as fast. An environment sleeps 50 ms per step.
- `Continuous` answers all prompts concurrently, each after its own time, like a server with continuous batching. The
  times are lognormal with median 0.3 s and a standard deviation of the logarithm of `sigma`. They depend only on the
  prompt. A replica that waited for its slowest answer would lose most of this engine's speed. An environment sleeps 20
  ms per step.

Turns are counted while all environments are open. Opening them takes seconds (`opening`), since each `Sleeping`
environment starts a Python process. This work does not become faster with more nodes, since they share the processors
of this machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

from perturn.cluster import ClusterWorlds, Replicas
from perturn.config.sections import Cluster, Worlds
from perturn.engines.streaming import answer_all
from perturn.envs.world_process import ProcessWorlds
from perturn.episodes.play_many import Job, play
from perturn.types import Action, Environment, EpisodeProtocol, Observation, Prompt, Sampling, Status, Task

CONVERSATIONS, TURNS, EPISODES = 16, 10, 64
SIGMAS = (0.0, 0.5, 1.0, 1.5)
AT_ONCE = 32
"""Number of concurrent conversations with `Continuous`."""
SMALL = {"include_dashboard": False, "object_store_memory": 100 * 2**20}


class Sleeping:
    """Environment whose steps take 50 ms without using the processor."""

    name = "sleeping-1.0"

    def tasks(self, split: str) -> list[Task]:
        """Return as many tasks as there are episodes."""
        return [Task(f"t/{number}") for number in range(EPISODES)]

    def reset(self, task: Task, seed: int) -> Observation:
        """Return the first observation."""
        return Observation("begin " + "word " * 60)

    def step(self, action: str) -> Observation:
        """Sleep, and return an observation."""
        time.sleep(0.05)
        return Observation("go on " + "word " * 60)

    def close(self) -> None:
        """Do nothing."""


class Cheap(Sleeping):
    """Environment whose steps take no time."""

    name = "cheap-1.0"

    def step(self, action: str) -> Observation:
        """Return an observation at once."""
        return Observation("go on")


class Short(Sleeping):
    """Environment whose steps take 20 ms without using the processor."""

    name = "short-1.0"

    def step(self, action: str) -> Observation:
        """Sleep, and return an observation."""
        time.sleep(0.02)
        return Observation("go on")


ANSWER = Action("Action: look around", token_ids=(7,) * 20, logprobs=(-0.5,) * 20, ended=True)
"""Answer with as many tokens as a short action."""


class Clock:
    """Engine that answers one prompt after the other, each in a fixed time."""

    name = "clock"

    def __init__(self, model: str) -> None:
        self.seconds = float(model)
        self.waiting: deque[Prompt] = deque()

    def submit(self, prompts, sampling):
        """Queue prompts."""
        self.waiting += prompts

    def advance(self):
        """Answer the first prompt in the queue."""
        if not self.waiting:
            return []
        time.sleep(self.seconds)
        return [(self.waiting.popleft(), ANSWER)]

    def generate(self, prompts, sampling):
        """Answer prompts one after the other."""
        return answer_all(self, prompts, sampling)

    def forget(self, conversation: str) -> None:
        """Do nothing, since the engine keeps no conversation."""

    def close(self) -> None:
        """Do nothing."""


class Continuous(Clock):
    """Engine that answers all prompts concurrently, each after its own time."""

    name = "continuous"

    def __init__(self, model: str) -> None:
        self.sigma = float(model)
        self.until: list[tuple[float, int, Prompt]] = []
        self.count = count()

    def submit(self, prompts, sampling):
        """Choose when each prompt will be answered."""
        for prompt in prompts:
            chance = random.Random(f"{prompt.conversation}, turn {len(prompt.turns)}")
            seconds = 0.3 * chance.lognormvariate(0, self.sigma)
            heappush(self.until, (time.monotonic() + seconds, next(self.count), prompt))

    def advance(self):
        """Return the answers that are due."""
        time.sleep(0.003)
        answered = []
        while self.until and self.until[0][0] <= time.monotonic():
            answered.append((heappop(self.until)[2], ANSWER))
        return answered


def section(world: str) -> dict[str, str]:
    """Return the section `environment` for an environment in this file."""
    return {"name": f"{Path(__file__).resolve()}:{world}"}


def opened(worlds: Callable[[], Environment], count: int) -> list[Environment]:
    """Open environments, and begin an episode in each."""

    def begin(number: int) -> Environment:
        world = worlds()
        world.reset(Task(f"t/{number}"), number)
        return world

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(begin, range(count)))


def collect(engine, worlds, tries: int, concurrency: int = CONVERSATIONS) -> dict[str, float]:
    """Return turns per second while all environments are open, and the time to open them, after a warm-up."""
    protocol = EpisodeProtocol("clock", format="action", max_turns=TURNS)
    jobs = [Job(Task(f"t/{number}"), number) for number in range(EPISODES)]
    rates, opening = [], []
    for _ in range(tries + 1):
        started = time.monotonic()
        ready = opened(worlds, concurrency)
        began = ended = time.monotonic()
        for one in play(
            jobs, engine, ready.pop, protocol=protocol, sampling=Sampling(), concurrency=concurrency
        ):
            assert one.status is Status.COMPLETED
            ended = time.monotonic()
        rates.append(EPISODES * TURNS / (ended - began))
        opening.append(began - started)
    return {
        "turns_per_second": round(statistics.median(rates[1:]), 1),
        "opening_s": round(statistics.median(opening[1:]), 2),
    }


def milliseconds(call: Callable[[], object], count: int = 300) -> float:
    """Return the median milliseconds of a call."""
    took = []
    for _ in range(count):
        began = time.monotonic()
        call()
        took.append(1000 * (time.monotonic() - began))
    return statistics.median(took)


def calls(where: str, worlds, engine, print_row: Callable[..., None]) -> None:
    """Measure a single step of an environment and a single prompt."""
    world = worlds()
    world.reset(Task("t"), 0)
    prompt = Prompt((), (), ({"role": "user", "content": "go"},), seed=0, conversation="alone")
    print_row(case="a step", where=where, ms=round(milliseconds(lambda: world.step("look around")), 3))
    print_row(
        case="a prompt", where=where, ms=round(milliseconds(lambda: engine.generate([prompt], Sampling())), 3)
    )
    world.close()


def vary(
    where: str, cluster: Cluster, here: dict[float, float], tries: int, print_row: Callable[..., None]
) -> None:
    """Measure one replica of `Continuous` by sigma, against the same engine in this process."""
    for sigma, base in here.items():
        replicas = Replicas(cluster, Continuous, str(sigma))
        found = collect(replicas, Short, tries, AT_ONCE)
        ratio = round(found["turns_per_second"] / base, 3)
        print_row(case="varying answers", where=where, sigma=sigma, **found, ratio=ratio)
        replicas.close()


def on_nodes(
    tries: int, call: str, base: float, here: dict[float, float], print_row: Callable[..., None], quick: bool
) -> None:
    """Measure one and two nodes, as a member and as a client of the cluster."""
    import ray  # imported late: processes of environments import this file
    from free_port import free_port
    from ray.cluster_utils import Cluster as LocalCluster

    port = free_port()
    local = LocalCluster(
        initialize_head=True, head_node_args=SMALL | {"num_cpus": 0, "ray_client_server_port": port}
    )
    for nodes in (1, 2):
        local.add_node(num_cpus=2, **SMALL)
        local.wait_for_nodes()
        ways = [("member", local.address), ("client", f"ray://127.0.0.1:{port}")]
        for where, address in ways[:1] if quick else ways:
            cluster = Cluster(address, engines=nodes)
            worlds = ClusterWorlds(section("Sleeping"), Worlds(), cluster, CONVERSATIONS)
            if nodes == 1:
                cheap = ClusterWorlds(
                    section("Cheap"), Worlds(), Cluster(address, world_cpus=0), CONVERSATIONS
                )
                calls(where, cheap, Replicas(cluster, Clock, "0"), print_row)
                del cheap
                vary(where, cluster, here, tries, print_row)
            replicas = Replicas(cluster, Clock, call)
            found = collect(replicas, worlds, tries)
            ratio = round(found["turns_per_second"] / base, 3)
            print_row(case="turns/s", where=where, nodes=nodes, **found, ratio=ratio)
            replicas.close()
            del worlds, replicas
            ray.shutdown()
    local.shutdown()


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--quick", action="store_true", help="one and two nodes alone")
    parser.add_argument("--call", type=float, default=0.01, help="seconds of `Clock` for each prompt")
    parser.add_argument("--tries", type=int, default=5)
    given = parser.parse_args()
    logging.getLogger("perturn").setLevel(logging.ERROR)

    def print_row(**row: object) -> None:
        print(json.dumps(row) if given.json else "  ".join(f"{value}" for value in row.values()), flush=True)

    call = str(given.call)
    calls("here", ProcessWorlds(section("Cheap"), Worlds()), Clock("0"), print_row)
    base = collect(Clock(call), ProcessWorlds(section("Sleeping"), Worlds()), given.tries)
    print_row(case="turns/s", where="here", nodes=0, **base, ratio=1.0)

    here = {}
    for sigma in () if given.quick else SIGMAS:
        found = collect(Continuous(str(sigma)), Short, given.tries, AT_ONCE)
        here[sigma] = found["turns_per_second"]
        print_row(case="varying answers", where="here", sigma=sigma, **found)
    on_nodes(given.tries, call, base["turns_per_second"], here, print_row, given.quick)


if __name__ == "__main__":
    main()
