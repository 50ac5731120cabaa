"""Ledger of a paid engine: an append-only file of the tokens spent and the answers received.

A resumed run plays its unfinished episodes again from their beginning. Answers that were already paid for are read
from the ledger. So the budget counts earlier spending, and no answer is paid for twice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from perturn.engines.api.completion import Tokens
from perturn.errors import RunError
from perturn.io.append_file import GrowingFile
from perturn.io.read_input import check_shape, complete_lines, parse_object

_REMEDY = "Remove the line, whose cost is then forgotten."


class _Answer(TypedDict):
    text: str
    ended: bool
    tool_calls: list[dict[str, Any]]
    reasoning: NotRequired[str]


class _Line(TypedDict):
    request: str
    prompt_tokens: Tokens
    completion_tokens: Tokens
    answer: _Answer | None


class Ledger:
    """Tokens spent and answers received; without a file, they are only in memory."""

    def __init__(self, path: Path | None) -> None:
        """Open the file, or create it; drop a last line that was cut short when a process was killed.

        Raises:
            RunError: If another process has the file open, or it cannot be read or written.
        """
        self.requests = self.prompt_tokens = self.completion_tokens = 0
        self.answers: dict[str, dict[str, Any]] = {}
        """Answers by the digest of their request."""
        self.usage: dict[str, tuple[int, int]] = {}
        """Tokens of the prompt and of the answer, by the digest of the request; 0 if the server did not say."""
        self._file: GrowingFile | None = None
        if path is not None:
            self._file = GrowingFile(path, RunError, lambda: self._read(path))

    def _read(self, path: Path) -> None:
        for number, line in complete_lines(path, RunError, _REMEDY):
            where = f"{path}:{number}"
            row = parse_object(line, where, RunError, _REMEDY)
            self._count(check_shape(row, _Line, where, RunError, _REMEDY))

    @property
    def tokens(self) -> int:
        """Number of tokens spent, prompts and completions together."""
        return self.prompt_tokens + self.completion_tokens

    def add(
        self, digest: str, answer: dict[str, Any] | None, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """Count a request and store its answer.

        Args:
            digest: Digest of the request.
            answer: The answer; None if it is unusable.
            prompt_tokens: Number of tokens of the prompt.
            completion_tokens: Number of tokens of the answer.

        Raises:
            StorageError: If the file cannot be written.
        """
        line = {
            "request": digest,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "answer": answer,
        }
        self._count(line)
        if self._file is not None:
            self._file.append(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Release the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _count(self, line: dict[str, Any]) -> None:
        self.prompt_tokens += line["prompt_tokens"]
        self.completion_tokens += line["completion_tokens"]
        self.requests += 1
        self.usage[line["request"]] = line["prompt_tokens"], line["completion_tokens"]
        if line["answer"] is not None:
            self.answers[line["request"]] = line["answer"]
