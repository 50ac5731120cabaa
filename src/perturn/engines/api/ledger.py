"""Ledger of a paid engine: an append-only file of the tokens spent and the answers received.

A resumed run plays its unfinished episodes again from their beginning. Answers that were already paid for are read
from the ledger. So the budget counts earlier spending, and no answer is paid for twice.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NotRequired

import httpx2
import openai
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
        if line["answer"] is not None:
            self.answers[line["request"]] = line["answer"]


LONGEST_ANSWER = 1 << 24
"""Largest size of an answer in bytes; the longest contexts of today's models need a quarter of it."""


class OversizedAnswer(Exception):
    """Raised if a server sends more than `LONGEST_ANSWER` bytes, or a compressed answer."""


class LimitedClient(openai.DefaultAsyncHttpxClient):
    """HTTP client for the official client, with limits on request rate, waiting time and answer size."""

    def __init__(self, seconds: float, per_minute: float | None) -> None:
        """Make a client.

        Args:
            seconds: Time limit of each request in seconds, from sending it to the last byte of its answer.
            per_minute: Largest number of requests per minute, evenly spaced; None: no limit. The wait before sending
                does not count towards `seconds`.
        """
        super().__init__(headers={"Accept-Encoding": "identity"}, event_hooks={"response": [_bound]})
        self._seconds = seconds
        self._gap = 60 / per_minute if per_minute else 0.0
        self._next = 0.0

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request and read its answer.

        Raises:
            ReadTimeout: If the time limit is exceeded; the official client then sends the request again.
            OversizedAnswer: If the answer is too long.
        """
        now = time.monotonic()
        turn = max(now, self._next)
        self._next = turn + self._gap
        await asyncio.sleep(turn - now)
        try:
            async with asyncio.timeout(self._seconds):
                return await super().send(request, **options)
        except TimeoutError as error:
            raise httpx2.ReadTimeout(f"no answer in {self._seconds:g} s", request=request) from error


async def _bound(response: httpx2.Response) -> None:
    if response.headers.get("content-encoding", "identity") != "identity":
        raise OversizedAnswer("it is packed, which was not asked for")
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    response.stream = _Bounded(response.stream)


class _Bounded(httpx2.AsyncByteStream):
    """A stream of bytes that raises `OversizedAnswer` after `LONGEST_ANSWER` bytes."""

    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        length = 0
        async for chunk in self._stream:
            length += len(chunk)
            if length > LONGEST_ANSWER:
                raise OversizedAnswer(f"it is longer than {LONGEST_ANSWER} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
