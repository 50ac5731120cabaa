"""An event loop in its own thread, for asynchronous engines and environments."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """Runs coroutines for a synchronous caller, even if the caller's thread has its own loop, as in a notebook."""

    def __init__(self, name: str) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._started: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine and return its future result."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._started.add(future)  # the loop holds only weak references to its tasks
        future.add_done_callback(self._started.discard)
        return future

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result; an exception in the waiting caller cancels the coroutine."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel running tasks and end the loop's threads, without waiting for them."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def close(self) -> None:
        """Cancel running tasks, and wait until the loop's threads have ended."""
        self.stop()
        self._thread.join()

    def _serve(self) -> None:
        with self._runner:  # leaving the block cancels the remaining tasks
            self._loop.run_forever()
