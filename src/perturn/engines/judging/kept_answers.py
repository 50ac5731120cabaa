"""Answers of a judge in an append-only file, so that a resumed run asks no question twice."""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from typing_extensions import TypedDict

from perturn.errors import RunError
from perturn.io.append_file import GrowingFile
from perturn.io.read_input import check_shape, complete_lines, parse_object

_REMEDY = "Remove the line; its question is then asked again."


class _Line(TypedDict):
    question: str
    answer: str


class KeptAnswers(MutableMapping[str, str]):
    """Answers by the digest of their question, in memory and in a file."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it; drop a last line that was cut short when a process was killed.

        Raises:
            RunError: If another process has the file open, or it cannot be read or written.
        """
        self._answers: dict[str, str] = {}
        self._file = GrowingFile(path, RunError, lambda: self._read(path))

    def _read(self, path: Path) -> None:
        for number, line in complete_lines(path, RunError, _REMEDY):
            where = f"{path}:{number}"
            row = check_shape(parse_object(line, where, RunError, _REMEDY), _Line, where, RunError, _REMEDY)
            self._answers[row["question"]] = row["answer"]

    def __getitem__(self, digest: str) -> str:
        return self._answers[digest]

    def __setitem__(self, digest: str, answer: str) -> None:
        self._file.append(json.dumps({"question": digest, "answer": answer}).encode() + b"\n")
        self._answers[digest] = answer

    def __delitem__(self, digest: str) -> None:
        raise TypeError("what was answered stays; remove the file to ask all again.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._answers)

    def __len__(self) -> int:
        return len(self._answers)

    def close(self) -> None:
        """Release the file."""
        self._file.close()
