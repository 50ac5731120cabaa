"""Read the tasks of an agent from a file, from a data set or from a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perturn.envs.json_rows import read_rows
from perturn.errors import DataError, check_fit, check_known
from perturn.faults import task_fault
from perturn.io.user_code import load_object
from perturn.types import Task


def read_tasks(
    source: str | Mapping[str, str], split: str, listed: Callable[[str], Sequence[Any]] | None = None
) -> list[Task]:
    """Return the tasks of a split.

    Args:
        source: File of rows, folder, data set `owner/name:split` of the Hub, or `module:function`. The function gets
            the split and returns rows. A dict gives one source per split. In a single source, the key `split` of a row
            names its split; rows without the key belong to `train`.
        split: Name of the split, such as `train`.
        listed: Function of an adapter that returns the rows of a source; None: read the source here.

    Raises:
        ConfigError: If the split does not exist or has no task.
        DataError: If a row is not an object, or cannot be a task.
    """
    if isinstance(source, Mapping):
        check_known(split, source, f"environment.tasks has no split {split!r}")
        return _tasks(source[split], split, listed, divided=False)
    found = _tasks(source, split, listed, divided=True)
    remedy = "{train: train.jsonl, test: test.jsonl}"
    remedy = (
        f"Give its rows a key `split`, or set environment.tasks to a source for each split, such as {remedy}."
    )
    check_fit(found, source, f"have a task of split {split!r}", found, remedy)
    return found


def _tasks(
    source: str, split: str, listed: Callable[[str], Sequence[Any]] | None, *, divided: bool
) -> list[Task]:
    """Return the tasks of a source.

    Args:
        source: Source of rows.
        split: Split that the tasks get.
        listed: Function of an adapter that returns the rows of a source; None: read the source here.
        divided: Whether to keep only the rows of this split.
    """
    if listed is not None:
        rows = list(listed(source))
    elif is_function(source):
        rows, divided = list(load_object(source)(split)), False
    else:
        rows = [row for _, row in read_rows(Path(source))]
    return [
        _task(row, f"{source}, row {number + 1}", number, split)
        for number, row in enumerate(rows)
        if not divided or not isinstance(row, Mapping) or row.get("split", "train") == split
    ]


def is_function(source: str) -> bool:
    """Return whether a source has the form `module:function` or `file.py:function`."""
    module, _, name = source.partition(":")
    is_module = all(part.isidentifier() for part in module.split("."))
    return name.isidentifier() and (module.endswith(".py") or is_module)


def _task(row: Any, where: str, number: int, split: str) -> Task:
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: expected an object, got {row!r:.60}. Write one object per task.")
    data = {str(key): value for key, value in row.items()}
    identity = str(data.get("id", f"{split}/{number:05d}"))
    task = Task(identity, str(data.get("kind", "")), split, data)
    if problem := task_fault(task):
        raise DataError(f"{where}: {problem}")
    return task


def plain(task: Task) -> dict[str, Any]:
    """Return a task as the dict that an agent reads: the row's keys and values, with `split`.

    A row without `id` or `kind` gets the task's.
    """
    return {"id": task.id, "kind": task.kind, **task.data, "split": task.split}


def sources_of(tasks: str | Mapping[str, str]) -> list[str]:
    """Return the sources of all splits as a list."""
    return [tasks] if isinstance(tasks, str) else list(tasks.values())
