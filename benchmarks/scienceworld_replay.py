"""Do ScienceWorld's episodes replay exactly? The counts of docs/environments.md.

    python benchmarks/scienceworld_replay.py                        # 3 tasks of each kind; 6 minutes on one core
    python benchmarks/scienceworld_replay.py --java-hash-codes      # objects have Java's own hash codes
    python benchmarks/scienceworld_replay.py --shared-state         # worlds share random numbers and object numbers

An episode has the first turns of the gold path. One turn of four is a random action from the gold paths of its kind.
Each episode is played alone, and then again in a new JVM among 16 worlds that take turns. An episode replays if all
observations, rewards and ends are equal. The output is a JSON object for each kind and one for all kinds.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import Any

from perturn.envs.scienceworld import jvm
from perturn.envs.scienceworld.environment import ScienceWorld
from perturn.errors import EnvironmentFailure
from perturn.types import Observation, Task

WORLDS = 16
SLIP = 0.25

Script = tuple[Task, list[str]]


def scripts(split: str, per_kind: int, turns: int) -> list[Script]:
    """Return random tasks of each kind with their actions. Tasks without a gold path are left out."""
    by_kind: dict[str, list[Task]] = defaultdict(list)
    found: dict[str, list[Script]] = defaultdict(list)
    with closing(ScienceWorld()) as world:
        for task in world.tasks(split):
            by_kind[task.kind].append(task)
        for kind, tasks in by_kind.items():
            for task in random.Random(kind).sample(tasks, min(per_kind, len(tasks))):
                try:
                    found[kind].append((task, list(world.expert(task))))
                except EnvironmentFailure as error:
                    print(json.dumps({"left_out": task.id, "error": str(error)}), flush=True)
    chance, made = random.Random(0), []
    for own in found.values():
        known = sorted({action for _, gold in own for action in gold})
        for task, gold in own:
            slips = [chance.random() < SLIP for _ in gold[:turns]]
            script = [
                chance.choice(known) if slip else action for slip, action in zip(slips, gold, strict=False)
            ]
            made.append((task, script))
    return made


def playing(world: ScienceWorld, script: Script) -> Iterator[Observation]:
    """Play an episode, and yield its observations."""
    task, actions = script
    yield world.reset(task)
    for action in actions:
        seen = world.step(action)
        yield seen
        if seen.terminated:
            return


def play(wanted: Sequence[Script], count: int) -> list[list[Observation]]:
    """Play episodes in a new JVM, in a number of worlds that take one turn each in rotation."""
    seen: list[list[Observation]] = [[] for _ in wanted]
    waiting = list(enumerate(wanted))[::-1]
    with ExitStack() as stack:
        worlds = [stack.enter_context(closing(ScienceWorld())) for _ in range(count)]
        live: list[tuple[int, ScienceWorld, Iterator[Observation]]] = []
        while waiting or live:
            while waiting and worlds:
                index, script = waiting.pop()
                world = worlds.pop()
                live.append((index, world, playing(world, script)))
            for one in list(live):
                index, world, episode = one
                answer = next(episode, None)
                if answer is None:
                    live.remove(one)
                    worlds.append(world)
                else:
                    seen[index].append(answer)
    return seen


def first_difference(one: Sequence[Observation], other: Sequence[Observation]) -> dict[str, Any] | None:
    """Return the first turn whose observations differ, and each field that differs; None if there is none."""
    for turn, (a, b) in enumerate(zip(one, other, strict=False)):
        fields = [(name, value, asdict(b)[name]) for name, value in asdict(a).items()]
        if a != b:
            return {"turn": turn, **{name: [x, y] for name, x, y in fields if x != y}}
    return None if len(one) == len(other) else {"turn": min(len(one), len(other))}


def main() -> None:
    """Play the episodes and print how many replay."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--split", default="train")
    parser.add_argument("--tasks", type=int, default=3, help="tasks of each kind")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--java-hash-codes", action="store_true")
    parser.add_argument("--shared-state", action="store_true")
    given = parser.parse_args()
    if given.java_hash_codes:
        jvm.SAME_ORDER = ()
    if given.shared_state:
        jvm.CHANGING = frozenset()
    wanted = scripts(given.split, given.tasks, given.turns)
    counts: dict[str, list[bool]] = defaultdict(list)
    example: dict[str, Any] = {}
    alone, among = play(wanted, 1), play(wanted, WORLDS)
    for (task, _), one, other in zip(wanted, alone, among, strict=True):
        difference = first_difference(one, other)
        counts[task.kind].append(difference is None)
        if difference and task.kind not in example:
            example[task.kind] = {"task": task.id, **difference}
    for kind, same in counts.items():
        print(
            json.dumps({"kind": kind, "tasks": len(same), "replay": sum(same), "example": example.get(kind)})
        )
    tasks, turns = len(wanted), sum(map(len, alone))
    print(json.dumps({"tasks": tasks, "turns": turns, "replay": sum(map(sum, counts.values()))}))


if __name__ == "__main__":
    main()
