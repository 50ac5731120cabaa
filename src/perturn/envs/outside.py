"""Shared parts of adapters to other people's interfaces: loading their code, and tasks that are seeds."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from perturn.errors import ConfigError, EnvironmentFailure, did_you_mean
from perturn.types import Task


def load_object(name: str) -> Any:
    """`module:attribute` or `file.py:attribute` -> the attribute; modules of the current folder are found too.

    Raises:
        ConfigError: If the module or the attribute is not there.
    """
    module, _, attribute = name.partition(":")
    folder, file = os.path.split(module)
    if module.endswith(".py"):
        module = file.removesuffix(".py")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module is code of others
        raise ConfigError(
            f"{name!r} cannot be loaded: {type(error).__name__}: {error}; write it as module:Class or file.py:Class."
        ) from error


def check_seeds(seeds: Mapping[str, int]) -> dict[str, int]:
    """Numbers of tasks by split, if there is one in each.

    Raises:
        ConfigError: If not.
    """
    if not seeds or any(count < 1 for count in seeds.values()):
        raise ConfigError(f"seeds must give each split a number of tasks >= 1, got {dict(seeds)}.")
    return dict(seeds)


def seed_tasks(seeds: Mapping[str, int], split: str) -> list[Task]:
    """The tasks of a split, each a seed; no two splits share one."""
    if split not in seeds:
        raise ConfigError(f"Unknown split {split!r}.{did_you_mean(split, seeds)}")
    names = list(seeds)
    first = sum(seeds[name] for name in names[: names.index(split)])
    return [Task(f"{split}/{n}", split=split, data={"seed": first + n}) for n in range(seeds[split])]


def task_seed(task: Task) -> int:
    """The seed that is the task.

    Raises:
        EnvironmentFailure: If the task is not one of `seed_tasks`.
    """
    seed = task.data.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise EnvironmentFailure(f"task {task.id!r} has no seed in its data, got {dict(task.data)!r:.80}.")
    return seed


def as_text(value: object, whose: str) -> str:
    """A text, as it is.

    Raises:
        EnvironmentFailure: If it is none, with what to do.
    """
    if not isinstance(value, str):
        raise EnvironmentFailure(
            f"{whose} is {value!r:.60} of type {type(value).__name__}, not a text. Remedy: write it as words first, "
            "such as in a wrapper of the environment."
        )
    return value


def as_number(value: object, whose: str) -> float:
    """A number; None counts as 0.

    Raises:
        EnvironmentFailure: If it is none.
    """
    try:
        return 0.0 if value is None else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise EnvironmentFailure(
            f"{whose} is {value!r:.60}, which is no number. Remedy: return a float."
        ) from None
