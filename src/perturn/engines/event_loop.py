"""An event loop in its own thread, for engines and worlds that are asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """Runs coroutines for a caller without an event loop, or with its own loop as in a notebook."""

    def __init__(self, name: str) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._started: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin; the result comes."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._started.add(future)  # a loop does not keep its tasks: they could be garbage before they end
        future.add_done_callback(self._started.discard)
        return future

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the result; an interrupt of the caller cancels the work."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel running tasks, and let the thread and its helpers end."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def close(self) -> None:
        """Cancel running tasks, and wait until the thread and its helpers have ended."""
        self.stop()
        self._thread.join()

    def _serve(self) -> None:
        with self._runner:  # its end cancels what is left
            self._loop.run_forever()
