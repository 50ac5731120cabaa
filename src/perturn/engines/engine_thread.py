"""An engine in its own thread: a new prompt joins the running batch at once, and a cancelled prompt leaves it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

from perturn.episodes.engine_abilities import CancellingEngine, abilities_of
from perturn.errors import EngineFailure, PerturnError
from perturn.types import Action, Engine, Prompt, Sampling, StreamingEngine

_log = logging.getLogger(__name__)
Result = TypeVar("Result")
Answered = Action | Exception
"""Answer to a prompt: an action, a failure of this prompt alone, or an exception that ended all open prompts."""
Deliver = Callable[[Sequence[tuple[Prompt, Answered]]], None]
_LAST_S = 5.0
"""Seconds that `generate` calls may still take when the thread ends, so that an API's answers are recorded."""


class EngineThread:
    """Runs an engine in one thread of its own; no other thread may call the engine."""

    def __init__(self, engine: Engine, deliver: Deliver) -> None:
        """Start the thread.

        Args:
            engine: The engine; it stays open when the thread ends.
            deliver: Called with prompts and their answers, in the engine's thread or in a thread of its pool. The
                answer to a cancelled prompt may still be delivered.
        """
        self._engine, self._work = engine, EngineWork(engine, deliver)
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._work.run, args=(self._orders.get,), name="perturn-engine", daemon=True
        )
        self._thread.start()

    def submit(self, prompt: Prompt, sampling: Sampling) -> None:
        """Start answering a prompt; its conversation must have no other open prompt."""
        self._orders.put(partial(self._work.begin, prompt, sampling))

    def cancel(self, conversation: str) -> None:
        """Stop answering the prompt of a conversation."""
        self._orders.put(partial(self._work.cancel, conversation))

    def forget(self, conversation: str) -> None:
        """Delete the state of a conversation that has ended."""
        self._orders.put(partial(self._work.forget, conversation))

    def call(self, work: Callable[[], Result]) -> Future[Result]:
        """Run a function in the engine's thread, between two passes of the engine; return its future result."""
        result: Future[Result] = Future()

        def do() -> None:
            try:
                result.set_result(work())
            except BaseException as error:  # noqa: BLE001  `Future.result` raises it again
                result.set_exception(error)

        self._orders.put(do)
        return result

    def close(self) -> None:
        """End the thread; unfinished answers are dropped. Concurrent calls get five seconds to end."""
        self._orders.put(None)
        self._thread.join()


class EngineWork:
    """Answers prompts in the thread that calls `run`; `run` executes orders between two passes of the engine."""

    def __init__(self, engine: Engine, deliver: Deliver) -> None:
        """Start with no prompts; see `EngineThread` for the arguments."""
        self._engine, self._deliver = engine, deliver
        self._streaming = engine if isinstance(engine, StreamingEngine) else None
        self._open: dict[str, Prompt] = {}
        self._batch: list[tuple[Prompt, Sampling]] = []
        self._queued: dict[str, Future[None]] = {}
        self._calls: set[Future[None]] = set()
        calls = abilities_of(engine).concurrent_calls
        self._pool = ThreadPoolExecutor(calls) if calls else None

    def run(self, next_order: Callable[[bool], Callable[[], None] | None]) -> None:
        """Answer prompts until there are no more orders.

        Args:
            next_order: Returns the next order, or None after the last order. Its argument says whether to wait for an
                order; without waiting, it raises `queue.Empty` if no order is there.
        """
        while True:
            is_idle = not (self._open or self._batch)
            while True:
                try:
                    order = next_order(is_idle)
                except queue.Empty:
                    break
                if order is None:
                    self._end()
                    return
                order()
                is_idle = False
            if self._open:
                self._advance()
            elif self._batch:
                self._answer_batch()

    def _end(self) -> None:
        for conversation in list(self._open):
            self.cancel(conversation)
        if self._pool is not None:
            self._deliver = lambda _: None
            self._pool.shutdown(wait=False, cancel_futures=True)  # waiting for all calls may take minutes
            wait(self._calls, timeout=_LAST_S)

    def begin(self, prompt: Prompt, sampling: Sampling) -> None:
        """Start answering a prompt; its conversation must have no other open prompt."""
        if self._pool is not None:
            work = self._pool.submit(self._answer, [(prompt, sampling)])
            self._queued[prompt.conversation] = work
            self._calls.add(work)
            work.add_done_callback(self._calls.discard)
        elif self._streaming is not None:
            try:
                self._streaming.submit([prompt], sampling)
                self._open[prompt.conversation] = prompt
            except Exception as error:  # noqa: BLE001  a template or engine may raise anything; only this prompt fails
                self._deliver([(prompt, error)])
        else:
            self._batch.append((prompt, sampling))

    def cancel(self, conversation: str) -> None:
        """Stop answering the prompt of a conversation."""
        self._batch = [each for each in self._batch if each[0].conversation != conversation]
        if conversation in self._queued:
            self._queued.pop(conversation).cancel()  # without effect if the call has begun
        is_begun = conversation in self._open or self._pool is not None
        if is_begun and isinstance(self._engine, CancellingEngine):
            self._open.pop(conversation, None)
            self._guarded(partial(self._engine.cancel, conversation), conversation)

    def forget(self, conversation: str) -> None:
        """Delete the state of a conversation that has ended."""
        self._queued.pop(conversation, None)
        self._guarded(lambda: self._engine.forget(conversation), conversation)

    def _guarded(self, work: Callable[[], None], conversation: str) -> None:
        """Call a method of the engine, which may lack it, and only log its error: no prompt waits for it."""
        try:
            work()
        except Exception:  # noqa: BLE001  a user's engine may raise anything; the thread continues
            _log.exception("the engine failed to release conversation %s", conversation)

    def _advance(self) -> None:
        """Run one pass of a streaming engine; if the pass raises, all open prompts fail."""
        assert self._streaming is not None
        answered: Sequence[tuple[Prompt, Answered]]
        try:
            answered = self._streaming.advance()
        except Exception as error:  # noqa: BLE001  a user's engine may raise anything; the thread continues
            answered = [(prompt, error) for prompt in self._open.values()]
            for conversation in list(self._open):
                self.cancel(conversation)
        for prompt, _ in answered:
            self._open.pop(prompt.conversation, None)
        if answered:
            self._deliver(answered)

    def _answer_batch(self) -> None:
        """Answer the waiting prompts that have the same sampling settings as the first, in one batch."""
        sampling = self._batch[0][1]
        batch = [each for each in self._batch if each[1] == sampling]
        self._batch = [each for each in self._batch if each[1] != sampling]
        self._answer(batch)

    def _answer(self, batch: Sequence[tuple[Prompt, Sampling]]) -> None:
        prompts = [prompt for prompt, _ in batch]
        answered: list[tuple[Prompt, Answered]]
        try:
            answers = self._engine.generate(prompts, batch[0][1])
            answered = list(zip(prompts, answers, strict=True))
        except Exception as error:  # noqa: BLE001  a user's engine may raise anything; the thread continues
            answered = [(prompt, error) for prompt in prompts]
        self._deliver(answered)


def explained(error: Exception) -> PerturnError:
    """Return the error itself if it is a `PerturnError`, otherwise an `EngineFailure` with its type and text."""
    if isinstance(error, PerturnError):
        return error
    return EngineFailure(f"the engine failed: {type(error).__name__}: {error}")
