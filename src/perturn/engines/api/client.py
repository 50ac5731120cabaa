"""An HTTP client that holds a server to limits: all of an answer within a time, and within a size.

The official client's own timeout is one of each read, which a server that sends a byte at a time never meets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx2
import openai

LONGEST_ANSWER = 1 << 24
"""Bytes of an answer; the longest contexts there are take a quarter of it."""


class OversizedAnswer(Exception):
    """A server sent more than `LONGEST_ANSWER`, or packed what it sent."""


class LimitedClient(openai.DefaultAsyncHttpxClient):
    """The official client's HTTP client, within limits."""

    def __init__(self, seconds: float, pace: Callable[[], Awaitable[None]]) -> None:
        """Make a client.

        Args:
            seconds: Limit for each request, from its sending to the last byte of its answer.
            pace: Waits for a request's turn, which does not count.
        """
        super().__init__(headers={"Accept-Encoding": "identity"}, event_hooks={"response": [_bound]})
        self._seconds, self._pace = seconds, pace

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request and read its answer.

        Raises:
            ReadTimeout: If that takes too long; the official client sends it again.
            OversizedAnswer: If the answer is too long.
        """
        await self._pace()
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
