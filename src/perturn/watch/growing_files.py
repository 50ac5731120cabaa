"""Growing JSONL files, read piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from perturn.data.run_files import REMEDY
from perturn.errors import RunError
from perturn.io.read_input import lines_of, parse_object

T = TypeVar("T")


def parse_metrics(raw: bytes, where: str) -> dict[str, float]:
    """The numbers of a line of metrics; those that are not finite too, which an alarm looks for.

    Raises:
        RunError: If it is no JSON object.
    """
    row = parse_object(raw, where, RunError, REMEDY)
    return {
        key: value
        for key, value in row.items()
        if isinstance(value, float) or (type(value) is int and abs(value) < 2**53)
    }


class Tail(Generic[T]):
    """The rows of a file that grows, or is written anew; each line is read once, when it is complete."""

    def __init__(self, file: Path, parse: Callable[[bytes, str], T]) -> None:
        self._file, self._parse = file, parse
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
                self.rows.append(self._parse(raw, f"{self._file}:{self._line}"))
                self._offset += len(raw)
        return self.rows

    def _reset(self) -> None:
        self._identity, self._offset, self._line, self.rows = None, 0, 0, []
