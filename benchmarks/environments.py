"""Environments: load, reset and steps a second, and memory, ours against the package they come from.

    python benchmarks/environments.py [--quick] [--json] [--case alfworld] [--data FOLDER] [--out FILE]

Both sides play the same games with the same actions in one run, one after the other in one thread. Times are processor
time, so that other work on the machine is not counted. A case whose package is not installed is left out, and said to
be. Ratios are theirs over ours in time a load or a step: larger is better.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

from perturn.envs.alfworld.environment import ALFWorld
from perturn.envs.alfworld.games import KINDS, GameText
from perturn.envs.alfworld.generated_games import ALFWorldLike
from perturn.envs.alfworld.official import ALFWorldOfficial, OfficialGame
from perturn.errors import EnvironmentFailure
from perturn.types import Environment, Task

Row = dict[str, Any]


@dataclass(frozen=True)
class Speed:
    """What playing some tasks took."""

    loads: list[float]
    """Seconds of each load and reset."""
    steps: list[float]
    """Seconds of each step."""
    megabytes: float
    """Memory that one more world with a game in it takes."""
    texts: list[str]
    """What it answered, to see that both sides played the same."""

    def summary(self) -> Row:
        """As a row has it."""
        return {
            "load_ms": round(1e3 * mean(self.loads), 3),
            "steps_per_s": round(len(self.steps) / sum(self.steps), 1),
            "megabytes": round(self.megabytes, 2),
        }


def measure(
    make: Callable[[], Environment], tasks: Sequence[Task], scripts: dict[str, list[str]], worlds: int
) -> Speed:
    """Play a script in each task; then count the memory of some more worlds."""
    world, loads, steps, texts = make(), list[float](), list[float](), list[str]()
    for task in tasks:
        began = time.process_time()
        texts.append(world.reset(task, 0).text)
        loads.append(time.process_time() - began)
        for action in scripts[task.id]:
            began = time.process_time()
            seen = world.step(action)
            steps.append(time.process_time() - began)
            texts.append(seen.text)
            if seen.terminated:
                break
    gc.collect()
    before, kept = psutil.Process().memory_info().rss, []
    for number in range(worlds):
        kept.append(make())
        kept[-1].reset(tasks[number % len(tasks)], 0)
    grown = (psutil.Process().memory_info().rss - before) / worlds / 1e6
    for each in (world, *kept):
        each.close()
    return Speed(loads, steps, grown, texts)


def compare(case: str, ours: Speed, theirs: Speed, **more: Any) -> Row:
    """Both sides as a row; refuses if they did not play alike."""
    if ours.texts != theirs.texts:
        differ = next(pair for pair in zip(ours.texts, theirs.texts, strict=False) if pair[0] != pair[1])
        raise SystemExit(f"{case}: the two sides did not answer alike: {differ}")
    return {
        "case": case,
        "steps_ratio": round(mean(theirs.steps) / mean(ours.steps), 1),
        "load_ratio": round(mean(theirs.loads) / mean(ours.loads), 1),
        "tasks": len(ours.loads),
        "steps": len(ours.steps),
        "ours": ours.summary(),
        "theirs": theirs.summary(),
        **more,
    }


def alfworld(quick: bool, data: str | None) -> Row:
    """ALFWorld's reader against the official engine, from game files as `alfworld-download` leaves them."""
    name, games = _alfworld_games(data)
    per_kind = 1 if quick else 3
    chosen = [one for kind in KINDS for one in [g for g in games if f"/{kind}" in g.id][:per_kind]]
    with tempfile.TemporaryDirectory() as folder:
        official, tasks = OfficialGame(), []
        for number, game in enumerate(chosen):
            kind = next(kind for kind in KINDS if f"/{kind}" in game.id)
            task = Task(f"valid_seen/{kind}-x/trial_{number}", kind, "valid_seen")
            file = Path(folder) / "json_2.1.1" / task.id / "game.tw-pddl"
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps(official.game_data(game)), encoding="utf-8")
            tasks.append(task)
        scripts = {task.id: _wander(ALFWorld(folder), task, 10 if quick else 40) for task in tasks}
        ours = measure(lambda: ALFWorld(folder), tasks, scripts, worlds=20 if quick else 200)
        theirs = measure(lambda: ALFWorldOfficial(folder), tasks, scripts, worlds=2 if quick else 5)
        package = ALFWorldOfficial(folder).name
    return compare("alfworld", ours, theirs, games=name, package=package, expert=_expert(data, quick))


def _alfworld_games(data: str | None) -> tuple[str, list[GameText]]:
    """Real games if there are some, or made-up ones; and what they are."""
    try:
        world: Any = ALFWorld(data)
        return "alfworld valid_seen", [world.game(task) for task in world.tasks("valid_seen")[::4]]
    except EnvironmentFailure:
        world = ALFWorldLike()
        return "alfworld-like valid_seen", [world.game(task) for task in world.tasks("valid_seen")]


def _wander(world: ALFWorld, task: Task, turns: int) -> list[str]:
    """Actions at random, half of them such that change something."""
    dice, script = random.Random(task.id), []
    seen = world.reset(task, 0)
    for _ in range(turns):
        busy = [each for each in seen.admissible if each.split()[0] not in ("go", "examine", "help", "look")]
        script.append(dice.choice(busy if busy and dice.random() < 0.5 else seen.admissible))
        seen = world.step(script[-1])
        if seen.terminated:
            break
    return script


def _expert(data: str | None, quick: bool) -> Row:
    """How often and how fast the exploring expert solves train games, from reading them to the last action."""
    try:
        world: Any = ALFWorld(data)
    except EnvironmentFailure:
        world = ALFWorldLike()
    tasks = world.tasks("train")
    tasks = tasks[::40] if quick else tasks
    began, solved = time.process_time(), 0
    for task in tasks:
        script = world.expert(task)
        world.reset(task, 0)
        seen = [world.step(action) for action in script][-1]
        solved += seen.success and len(script) <= 40
    seconds = time.process_time() - began
    return {
        "environment": world.name,
        "tasks": len(tasks),
        "solved_within_40": round(solved / len(tasks), 4),
        "episodes_per_s": round(len(tasks) / seconds, 1),
    }


CASES: dict[str, tuple[str, Callable[[bool, str | None], Row]]] = {"alfworld": ("alfworld", alfworld)}
"""Case -> the module of the package that it is compared with, and what measures it."""


def main() -> None:
    """Measure the cases that can be measured here."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few tasks only, to see that it works")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--case", choices=CASES, action="append", help="this case only; may be repeated")
    parser.add_argument("--data", help="folder of ALFWorld's games; $ALFWORLD_DATA, or generated games")
    parser.add_argument("--out", type=Path, help="file to write the rows to")
    given = parser.parse_args()
    rows = []
    for case in given.case or CASES:
        package, run = CASES[case]
        if importlib.util.find_spec(package) is None:
            print(f"{case}: left out, since the package {package!r} is not installed", file=sys.stderr)
            continue
        rows.append(run(given.quick, given.data))
    for row in rows:
        print(json.dumps(row) if given.json else _table(row), flush=True)
    if given.out and rows:
        given.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")


def _table(row: Row) -> str:
    """A row for people."""
    lines = [f"{row['case']}: {row['tasks']} tasks, {row['steps']} steps"]
    lines += [f"{'':12}{'ours':>12}{'theirs':>12}{'ratio':>10}"]
    ratios = {"load_ms": row["load_ratio"], "steps_per_s": row["steps_ratio"]}
    for key in row["ours"]:
        lines += [f"{key:12}{row['ours'][key]:>12}{row['theirs'][key]:>12}{ratios.get(key, ''):>10}"]
    rest = {key: row[key] for key in row if key not in ("case", "ours", "theirs", "tasks", "steps")}
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in rest.items())])


if __name__ == "__main__":
    main()
