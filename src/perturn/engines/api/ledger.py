"""Ledger of a paid engine: its spending and the answers bought, in a file that only grows.

A run that was stopped plays its unfinished episodes again from their beginning. The answers that were already
paid for are read from here, so neither the budget is forgotten nor an answer bought twice.
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
    """Tokens spent and answers bought; in memory alone if there is no file."""

    def __init__(self, path: Path | None) -> None:
        """Open the file, making it if there is none; a line that a kill cut short is dropped.

        Raises:
            RunError: If another process has it open, or it cannot be read or written.
        """
        self.requests = self.prompt_tokens = self.completion_tokens = 0
        self.answers: dict[str, dict[str, Any]] = {}
        """By the digest of their request."""
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
        """Tokens spent, of prompts and completions together."""
        return self.prompt_tokens + self.completion_tokens

    def add(
        self, digest: str, answer: dict[str, Any] | None, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """Count a request, and keep its answer if it is usable.

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
"""Bytes of an answer; the longest contexts there are take a quarter of it."""


class OversizedAnswer(Exception):
    """A server sent more than `LONGEST_ANSWER`, or a compressed answer."""


class LimitedClient(openai.DefaultAsyncHttpxClient):
    """The official client's HTTP client, within limits."""

    def __init__(self, seconds: float, per_minute: float | None) -> None:
        """Make a client.

        Args:
            seconds: Limit for each request, from its sending to the last byte of its answer.
            per_minute: Requests sent in a minute at most, evenly spaced; the wait for a free slot does not count.
        """
        super().__init__(headers={"Accept-Encoding": "identity"}, event_hooks={"response": [_bound]})
        self._seconds = seconds
        self._gap = 60 / per_minute if per_minute else 0.0
        self._next = 0.0

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request and read its answer.

        Raises:
            ReadTimeout: If that takes too long; the official client sends it again.
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
    """A stream that ends in an error where it grows too long."""

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
