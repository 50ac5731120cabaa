"""Growing JSONL files, read piece by piece: episodes as the few numbers that are shown, metrics as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from perturn.errors import RunError

T = TypeVar("T")


@dataclass(frozen=True)
class Episode:
    """What is kept of a trajectory."""

    task: str
    score: float
    success: bool
    failed: bool
    surprise: float | None
    """Mean negative log-probability of its sampled tokens, in nats; None if none were recorded."""


def read_episode(row: dict[str, Any]) -> Episode:
    """The numbers of one stored trajectory."""
    failed = row.get("status") == "failed"
    sampled = [logprob for turn in row["turns"] for logprob in (turn["action"].get("logprobs") or ())]
    return Episode(
        task=row["task"]["id"],
        score=0.0 if failed else float(row.get("total_reward", 0.0)),
        success=bool(row.get("success")),
        failed=failed,
        surprise=-sum(sampled) / len(sampled) if sampled else None,
    )


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
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                self._line += 1
                self.rows.append(self._parse(raw))
                self._offset += len(raw)
        return self.rows

    def _parse(self, raw: bytes) -> T:
        try:
            return self._read(json.loads(raw))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"{self._file}:{self._line}: not a row of this file ({type(error).__name__}: {error})."
            ) from error

    def _reset(self) -> None:
        self._identity, self._offset, self._line, self.rows = None, 0, 0, []
