"""Folders of studies that nobody ran: what `perturn study` leaves, of policies whose true success is known."""

import json

import numpy as np
import yaml

from perturn.study.tables.episode_table import EPISODES, write_episodes

KINDS = ("pick", "clean", "heat")
GAINS = {"base": -4.0, "sft": 0.0, "dpo": 0.0, "tlm-dre": 0.05, "online": 0.8, "harmful": -1.2}
"""Gain of each method over SFT, in standard deviations of what decides an episode; 0.8 are some 15 points."""
RATES = (1e-6, 1e-5, 1e-4)
HARM = {1e-6: 0.0, 1e-5: 0.0, 1e-4: -1.0}
"""What a learning rate does to a method besides."""


def episodes(method, gain, seed, *, environment, task_list, tasks, point=""):
    """Episodes of one policy: games differ in difficulty, and a seed's luck with one is shared by its policies."""
    shared = np.random.default_rng([seed, tasks, len(task_list)])
    difficulty = np.random.default_rng([tasks, len(task_list)]).normal(0.7, 1.2, tasks)
    luck = shared.normal(0, 0.45, tasks)
    own = np.random.default_rng([seed, tasks, *method.encode(), *point.encode()]).normal(0, 0.1, tasks)
    success = difficulty + luck + own + gain > 0
    turns = np.where(success, 8 + np.abs(np.round(4 * difficulty)), 30).astype(int)
    for task in range(tasks):
        yield {
            "environment": environment, "method": method, "point": point, "seed": seed, "panel": task_list,
            "task": f"{task_list}-{task:03d}", "kind": KINDS[task % 3], "success": bool(success[task]),
            "score": float(success[task]), "turns": int(turns[task]), "invalid": int(turns[task]) // 3,
            "failed": False,
        }  # fmt: skip


def cell(row, point, state="done", error=None, seconds=60.0):
    """The cell of an episode."""
    key = {name: row[name] for name in ("environment", "method", "seed", "panel")}
    return key | {"point": point, "state": state, "error": error, "seconds": seconds, "runs": []}


def make(
    folder, *, seeds=(0, 1, 2), tasks=140, environments=("alfworld",), methods=tuple(GAINS), baseline="sft"
):
    """A whole study: methods beyond SFT are tuned on two seeds of 60 games, and tested at the best."""
    cells, rows = [], []
    for environment in environments:
        for method in methods:
            best = None
            for point in points_of(method):
                text = ", ".join(f"{key}={value}" for key, value in point.items())
                gain = GAINS[method] + sum(HARM[rate] for rate in point.values())
                key = {"environment": environment, "point": text}
                made = [
                    [*episodes(method, gain, seed, task_list="tune", tasks=60, **key)] for seed in seeds[:2]
                ]
                solved = sum(row["success"] for played in made for row in played)
                if best is None or solved > best[0]:
                    best = solved, gain, point, key
                cells += [cell(played[0], point) for played in made]
                rows += [row for played in made for row in played]
            _, gain, point, key = best
            for seed in seeds:
                played = [*episodes(method, gain, seed, task_list="test", tasks=tasks, **key)]
                cells.append(cell(played[0], point))
                rows += played
    sweep = {"align.learning_rate": list(RATES)}
    settings = {
        "name": "offline",
        "baseline": baseline,
        "methods": {name: {} for name in methods},
        "sweep": sweep,
    }
    write(folder, settings, cells, rows)
    return settings, cells, rows


def points_of(method):
    """Points that a method tries."""
    return [{}] if method in ("base", "sft") else [{"align.learning_rate": rate} for rate in RATES]


def write(folder, settings, cells, rows):
    """The three files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    (folder / "cells.json").write_text(json.dumps(cells), encoding="utf-8")
    write_episodes(folder / EPISODES, rows)


def small(folder, scores, *, baseline="sft", measure=None):
    """A study of hand-written successes: method -> seed -> task -> success, on the test tasks alone."""
    rows = [
        {"environment": "toy", "method": method, "point": "", "seed": seed, "panel": "test", "task": task, "kind": "",
         "success": bool(ok), "score": float(ok) if measure is None else measure(method, task), "turns": 4,
         "invalid": 1, "failed": False}
        for method, seeds in scores.items() for seed, tasks in seeds.items() for task, ok in tasks.items()
    ]  # fmt: skip
    cells = [
        {"environment": "toy", "method": method, "point": {}, "seed": seed, "panel": "test", "state": "done",
         "error": None, "seconds": 2.0}
        for method, seeds in scores.items() for seed in seeds
    ]  # fmt: skip
    write(folder, {"name": "toy", "baseline": baseline}, cells, rows)
    return cells, rows


def by_task(*successes):
    """Successes by task."""
    return {f"t{index}": ok for index, ok in enumerate(successes)}
