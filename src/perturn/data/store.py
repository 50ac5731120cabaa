"""Trajectories and preference pairs on disk: JSON Lines, one object per line, read as strictly as written.

A trajectory file only grows. A line is written in one call and is durable before `append` returns.
A killed run loses at most the line it was writing, and the next run removes the rest of that line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from perturn.data.records import line_of, parse_line
from perturn.errors import DataError, StorageError
from perturn.io.append_file import GrowingFile
from perturn.io.atomic_write import replacing
from perturn.io.read_input import read_lines, user_path
from perturn.types import PreferencePair, Trajectory

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def read_trajectories(path: str | os.PathLike[str]) -> Iterator[Trajectory]:
    """Yield the trajectories of a file in the order they were written, one in memory at a time.

    The file is not changed and may be growing: a last line without its newline is left out, with a warning. Any other
    malformed line, or a second one with the same key, is a `DataError`.
    """
    lines: dict[tuple[str, int], int] = {}
    for number, raw in _lines(path):
        if not raw.endswith(b"\n"):
            _log.warning("%s:%d: dropped the last line, whose write was cut short.", path, number)
            return
        trajectory = parse_line(Trajectory, raw, f"{path}:{number}")
        if trajectory.key in lines:
            raise DataError(
                f"{path}:{number}: task.id: expected a task and sample not seen before, "
                f"got the same key in line {lines[trajectory.key]}. Delete one of the two lines."
            )
        lines[trajectory.key] = number
        yield trajectory


class TrajectoryStore:
    """A file of trajectories open for appending, at most one trajectory for each key (task id, sample).

    Opening creates the file if need be, takes a lock on it, checks every line, and cuts off a last line that
    a kill left without its newline. To read a file that another process may be writing, there is
    `read_trajectories`, which neither locks nor changes it.

    Args:
        path: The file; its folder is created too.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._open()

    def _open(self) -> None:
        self._keys: set[tuple[str, int]] = set()
        self._file: GrowingFile | None = GrowingFile(self.path, DataError, self._read_keys)

    def _read_keys(self) -> None:
        self._keys.update(trajectory.key for trajectory in self)

    def append(self, trajectory: Trajectory) -> None:
        """Write one trajectory; on return it is on the disk.

        Raises `DataError` if its key is taken or JSON cannot hold it; `StorageError`, and closes, if the write fails.
        """
        if self._file is None:
            raise DataError(f"{self.path}: the store is closed. Open it again with TrajectoryStore(path).")
        if trajectory.key in self._keys:
            task, sample = trajectory.key
            raise DataError(
                f"{self.path}: expected a new task and sample, got task {task!r}, sample {sample}, which is "
                "already recorded. Skip what is in keys(), or count sample up."
            )
        line = line_of(trajectory)
        self._keys.add(trajectory.key)
        try:
            self._file.append(line)
        except StorageError:
            self.close()
            raise

    def drop(self, unwanted: Callable[[Trajectory], bool]) -> int:
        """Remove trajectories from the file, whole or not at all, so that others can be recorded instead.

        Returns:
            How many were taken out.
        """
        kept = [trajectory for trajectory in self if not unwanted(trajectory)]
        dropped = len(self) - len(kept)
        if dropped:
            with replacing(self.path) as fresh, fresh.open("wb") as file:
                file.writelines(line_of(trajectory) for trajectory in kept)
            self.close()
            self._open()
        return dropped

    def keys(self) -> set[tuple[str, int]]:
        """Return the (task id, sample) of every trajectory."""
        return set(self._keys)

    def read(self) -> Iterator[Trajectory]:
        """Yield the trajectories in the order they were written, one in memory at a time."""
        return read_trajectories(self.path)

    __iter__ = read

    def close(self) -> None:
        """Release the lock and the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __len__(self) -> int:
        return len(self._keys)

    def __enter__(self) -> TrajectoryStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_pairs(path: str | os.PathLike[str], pairs: Iterable[PreferencePair]) -> int:
    """Write or replace a file of preference pairs, completely or not at all; returns their number."""
    return write_records(path, pairs)


def read_pairs(path: str | os.PathLike[str]) -> list[PreferencePair]:
    """Return the pairs of a file in order; it is written whole, so a torn line is damage, and an error."""
    return list(read_records(path, PreferencePair))


def write_records(path: str | os.PathLike[str], records: Iterable[Any]) -> int:
    """Write or replace a file of dataclasses, one per line, completely or not at all.

    Returns how many.
    """
    count = 0
    with replacing(path) as fresh, fresh.open("wb") as file:
        for each in records:
            file.write(line_of(each))
            count += 1
    return count


def read_records(path: str | os.PathLike[str], kind: type[_T]) -> Iterator[_T]:
    """Yield the dataclasses of a file that `write_records` wrote, in order; a torn line is damage, and an error."""
    return (parse_line(kind, raw, f"{path}:{number}") for number, raw in _lines(path))


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes]]:
    """Yield the numbered lines of a file, split at newlines alone."""
    file = user_path(path, "file of trajectories")
    if not file.is_file():
        raise DataError(f"{path}: expected a file, got none. Write it first, or correct the path.")
    yield from read_lines(file, DataError)
