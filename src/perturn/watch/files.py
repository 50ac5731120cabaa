"""Growing JSONL files, read piece by piece: episodes as the few numbers that are shown, metrics as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from perturn.data.run_files import REMEDY
from perturn.data.store import trajectory_from_dict
from perturn.errors import PerturnError, RunError
from perturn.io.reading import check_shape, lines_of, parse_json
from perturn.types import failed, score, succeeded

T = TypeVar("T")


@dataclass(frozen=True)
class Episode:
    """The part of a trajectory that is kept."""

    task: str
    score: float
    success: bool
    failed: bool
    surprise: float | None
    """Mean negative log-probability of its sampled tokens, in nats; None if none were recorded."""


def read_episode(row: dict[str, Any]) -> Episode:
    """The numbers of one stored trajectory."""
    played = trajectory_from_dict(row)
    sampled = [logprob for turn in played.turns for logprob in turn.action.logprobs or ()]
    return Episode(
        task=played.task.id,
        score=score(played),
        success=succeeded(played),
        failed=failed(played),
        surprise=-sum(sampled) / len(sampled) if sampled else None,
    )


def read_metrics(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics; those that are not finite too, which an alarm looks for."""
    check_shape(row, dict[str, Any], "row", RunError)
    return {
        key: value
        for key, value in row.items()
        if isinstance(value, float) or (type(value) is int and abs(value) < 2**53)
    }


class Tail(Generic[T]):
    """The rows of a file that grows, or is written anew; each line is read once, when it is complete."""

    def __init__(self, file: Path, read: Callable[[dict[str, Any]], T]) -> None:
        self._file, self._read = file, read
        self._identity: tuple[int, int] | None = None
        self._offset = self._line = 0
        self.rows: list[T] = []

    def look(self) -> list[T]:
        """All rows there are now.

        Raises:
            RunError: If a complete line is not what it should be.
        """
        try:
            status = self._file.stat()
        except OSError:
            self._reset()
            return self.rows
        if (status.st_dev, status.st_ino) != self._identity or status.st_size < self._offset:
            self._reset()
            self._identity = (status.st_dev, status.st_ino)
        with self._file.open("rb") as file:
            file.seek(self._offset)
            for _, raw in lines_of(file, str(self._file), RunError, REMEDY):
                if not raw.endswith(b"\n"):
                    break
                self._line += 1
                self.rows.append(self._parse(raw))
                self._offset += len(raw)
        return self.rows

    def _parse(self, raw: bytes) -> T:
        where = f"{self._file}:{self._line}"
        row = parse_json(raw, where, RunError, REMEDY)
        try:
            return self._read(row)
        except PerturnError as error:
            raise RunError(f"{where}: not a row of this file: {error}") from error

    def _reset(self) -> None:
        self._identity, self._offset, self._line, self.rows = None, 0, 0, []
