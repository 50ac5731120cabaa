"""HTTP client of an engine behind an API, with limits on request rate, waiting time and answer size."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai

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
