"""Shared parts of adapters to other people's interfaces: tasks that are seeds, and values of the right kinds."""

from __future__ import annotations

from collections.abc import Mapping

from perturn.errors import ConfigError, EnvironmentFailure, did_you_mean
from perturn.types import Task


def check_seeds(seeds: Mapping[str, int] | None) -> dict[str, int]:
    """Numbers of tasks by split, if there is one in each; None: 200 train, 100 test.

    Raises:
        ConfigError: If not.
    """
    counts = dict({"train": 200, "test": 100} if seeds is None else seeds)
    if not counts or any(count < 1 for count in counts.values()):
        raise ConfigError(f"seeds must give each split a number of tasks >= 1, got {counts}.")
    return counts


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
