"""Measure load and reset times, steps per second and memory of environments, against the original packages.

    python benchmarks/environments.py [--quick] [--json] [--case alfworld] [--data FOLDER] [--out FILE]

Both sides play the same games with the same actions, one after the other in one thread. Times are CPU times, so that
other work on the machine is not counted. A case whose package is not installed is reported and skipped. A ratio is the
original's time per load or step over Perturn's, so larger is better.
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
    """Times and memory for playing some tasks."""

    loads: list[float]
    """Seconds of each load with reset."""
    steps: list[float]
    """Seconds of each step."""
    megabytes: float
    """Memory of one more environment with a loaded game, in MB."""
    texts: list[str]
    """Observations, to check that both sides played the same."""

    def summary(self) -> Row:
        """Return the figures as a row."""
        return {
            "load_ms": round(1e3 * mean(self.loads), 3),
            "steps_per_s": round(len(self.steps) / sum(self.steps), 1),
            "megabytes": round(self.megabytes, 2),
        }


def measure(
    make: Callable[[], Environment], tasks: Sequence[Task], scripts: dict[str, list[str]], worlds: int
) -> Speed:
    """Play a script in each task, and then measure the memory of additional environments."""
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
    """Return both sides as a row. Exit if their observations differ."""
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
    """Compare ALFWorld's reader with the official engine, on game files of `alfworld-download`."""
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
    """Return a description and games: real games if they are installed, and generated games otherwise."""
    try:
        world: Any = ALFWorld(data)
        return "alfworld valid_seen", [world.game(task) for task in world.tasks("valid_seen")[::4]]
    except EnvironmentFailure:
        world = ALFWorldLike()
        return "alfworld-like valid_seen", [world.game(task) for task in world.tasks("valid_seen")]


def _wander(world: ALFWorld, task: Task, turns: int) -> list[str]:
    """Return random actions. Half of the actions change the state of the game."""
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
    """Measure how often and how fast the exploring expert solves train games, including reading them."""
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
"""Name of each case, with the module that it needs and the function that measures it."""


def main() -> None:
    """Measure the cases whose packages are installed."""
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
    """Return a row as a line of text."""
    lines = [f"{row['case']}: {row['tasks']} tasks, {row['steps']} steps"]
    lines += [f"{'':12}{'ours':>12}{'theirs':>12}{'ratio':>10}"]
    ratios = {"load_ms": row["load_ratio"], "steps_per_s": row["steps_ratio"]}
    for key in row["ours"]:
        lines += [f"{key:12}{row['ours'][key]:>12}{row['theirs'][key]:>12}{ratios.get(key, ''):>10}"]
    rest = {key: row[key] for key in row if key not in ("case", "ours", "theirs", "tasks", "steps")}
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in rest.items())])


if __name__ == "__main__":
    main()
