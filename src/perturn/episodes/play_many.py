"""Play many episodes at once with an engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from itertools import islice
from math import ceil
from statistics import median
from threading import Semaphore

from perturn.episodes.engine_abilities import CancellingEngine, abilities_of, checked_answers
from perturn.episodes.episode import Episode as Episode
from perturn.episodes.episode import Job as Job
from perturn.episodes.episode import episode as episode
from perturn.episodes.world_threads import Hear, Worker, Workers, ignore
from perturn.errors import EngineFailure
from perturn.types import (
    Action,
    Engine,
    Environment,
    EpisodeProtocol,
    Prompt,
    Sampling,
    StreamingEngine,
    Trajectory,
)

_PATIENCE = 0.2
"""Time that the engine waits for more prompts, as a fraction of the time of a batch."""
_IDLE = 0.25
"""Seconds that the engine may be idle for each second of work, if environments are slower than the engine."""
_MOMENT_S = 0.003
"""Seconds to wait for an answer to concurrent calls, before the next prompts are passed on."""
_LAST_S = 5.0
"""Seconds that open calls may still take when a play is interrupted, so that an API's answers are recorded."""


def play(
    jobs: Iterable[Job],
    engine: Engine,
    make_environment: Callable[[], Environment],
    *,
    protocol: EpisodeProtocol,
    sampling: Sampling,
    concurrency: int = 16,
    retries: int = 1,
    hear: Hear = ignore,
    slots: Semaphore | None = None,
) -> Iterator[Trajectory]:
    """Play many episodes at once, and yield each trajectory as soon as its episode ends.

    Each environment is made, stepped and closed in its own thread. The engine never waits for the slowest environment.
    An engine that allows concurrent calls gets each prompt in a call of its own, as soon as one of its threads is free.
    Other engines answer in the thread that consumes the trajectories. A streaming engine accepts prompts as they come.
    The remaining engines wait for more prompts for at most a fifth of the time of a batch. So the order of trajectories
    and the batches depend on timing. Each answer is the same at any timing, except for rounding (see `Prompt.seed`).

    Args:
        jobs: Episodes to play, in the order in which they start.
        engine: Engine that answers the prompts.
        make_environment: Starts an environment, in any thread. At most `concurrency` environments run at a time. An
            environment is replaced after a FAILED episode.
        protocol: Rules of the episodes.
        sampling: Decoding of actions.
        concurrency: Number of episodes that run at the same time.
        retries: Number of times to replay an episode whose environment died or hung (`WorldLost`).
        hear: Callback for each prompt and each trajectory, so that progress can be measured in turns.
        slots: Semaphore that limits the open environments of several concurrent calls of `play`. None: no limit.
    """
    coming = iter(jobs)
    abilities = abilities_of(engine)

    def start(env: Environment, job: Job) -> Episode:
        name = engine.name  # the engine's policy may change later
        sharpened = sampling.sharpens
        return episode(env, job, protocol=protocol, policy=name, abilities=abilities, sharpened=sharpened)

    workers = Workers(start, make_environment, retries, coming, hear, slots)
    counter: _Stream | _Calls | _Batches = _Batches(engine, sampling)
    if isinstance(engine, StreamingEngine):
        counter = _Stream(engine, sampling)
    elif abilities.concurrent_calls:
        counter = _Calls(engine, sampling, min(concurrency, abilities.concurrent_calls))
    asked: dict[str, Worker] = {}
    with closing(workers), closing(counter):
        workers.begin(islice(coming, concurrency))
        while workers.busy:
            for worker, said in workers.listen(counter.wait):
                if isinstance(said, Prompt):
                    asked[said.conversation] = worker
                    counter.submit(said, worker.took)
                else:
                    engine.forget(Job(said.task, said.seed, said.sample).conversation)
                    yield said
            for prompt, answer in counter.advance(workers.busy):
                asked.pop(prompt.conversation).inbox.put(answer)


def play_alone(
    jobs: Iterable[Job],
    start: Callable[[Environment, Job], Episode],
    make_environment: Callable[[], Environment],
    *,
    concurrency: int = 16,
    retries: int = 1,
    hear: Hear = ignore,
) -> Iterator[Trajectory]:
    """Play many episodes without an engine at once, such as expert episodes; see `play`.

    Args:
        jobs: Episodes to play, in the order in which they start.
        start: Function that starts an episode for a job in an environment. The episode must end without a prompt.
        make_environment: Starts an environment, in any thread.
        concurrency: Number of episodes that run at the same time.
        retries: Number of times to replay an episode whose environment died or hung (`WorldLost`).
        hear: Callback for each prompt and each trajectory, so that progress can be measured in turns.
    """
    coming = iter(jobs)
    workers = Workers(start, make_environment, retries, coming, hear)
    try:
        workers.begin(islice(coming, concurrency))
        for _, said in workers.listen(lambda _: None):
            assert isinstance(said, Trajectory)
            yield said
    finally:
        workers.close()


_Answered = list[tuple[Prompt, Action | EngineFailure]]


class _Stream:
    """Pass prompts to a streaming engine, which accepts prompts while it answers others."""

    def __init__(self, engine: StreamingEngine, sampling: Sampling) -> None:
        self._engine, self._sampling = engine, sampling
        self._open: dict[int, Prompt] = {}
        """Id -> prompt. The engine may also answer prompts of an earlier play, which was interrupted."""

    def wait(self, busy: int) -> float | None:
        """Return how many seconds to wait for more prompts; None: no limit."""
        return 0.0 if self._open else None

    def submit(self, prompt: Prompt, took: float | None) -> None:
        """Pass a prompt to the engine."""
        self._open[id(prompt)] = prompt
        self._engine.submit([prompt], self._sampling)

    def advance(self, busy: int) -> _Answered:
        """Let the engine work for a moment and return the finished answers."""
        answered = self._engine.advance() if self._open else []
        checked_answers(self._engine, [answer for _, answer in answered], len(answered))
        return [each for each in answered if self._open.pop(id(each[0]), None) is not None]

    def close(self) -> None:
        """Cancel the prompts that are still open, since the play was interrupted."""
        if isinstance(self._engine, CancellingEngine):
            for prompt in self._open.values():
                self._engine.cancel(prompt.conversation)


class _Calls:
    """Call an engine with single prompts, so that no prompt waits for the slowest; at most `most` calls at a time."""

    def __init__(self, engine: Engine, sampling: Sampling, most: int) -> None:
        self._engine, self._sampling = engine, sampling
        self._error: Exception | None = None
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="engine")
        self._open: dict[Future[Sequence[Action | EngineFailure]], Prompt] = {}

    def wait(self, busy: int) -> float | None:
        """Return how many seconds to wait for more prompts; None: no limit."""
        return 0.0 if self._open else None

    def submit(self, prompt: Prompt, took: float | None) -> None:
        """Call the engine with a prompt, in a thread of the pool, once one is free."""
        self._open[self._pool.submit(self._answer, prompt)] = prompt

    def _answer(self, prompt: Prompt) -> Sequence[Action | EngineFailure]:
        """Return the engine's answer. After an error, raise it for each further prompt, without a call."""
        if self._error is None:
            try:
                return self._engine.generate([prompt], self._sampling)
            except Exception as error:  # noqa: BLE001  a user's engine may raise anything; `advance` raises it again
                self._error = error
        raise self._error

    def advance(self, busy: int) -> _Answered:
        """Wait for a moment and return the finished answers; if a call raises, wait for the other calls and raise."""
        ended = wait(self._open, _MOMENT_S, FIRST_COMPLETED).done
        if any(call.exception() for call in ended):
            self._pool.shutdown(cancel_futures=True)  # paid answers of an API must be recorded
        return [(self._open.pop(call), checked_answers(self._engine, call.result(), 1)[0]) for call in ended]

    def close(self) -> None:
        """Drop the prompts that are still open, since the play was interrupted."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        wait([call for call in self._open if not call.cancelled()], _LAST_S)


class _Batches:
    """Collect prompts for an engine that answers in batches, and choose the time and size of each batch."""

    def __init__(self, engine: Engine, sampling: Sampling) -> None:
        self._engine, self._sampling = engine, sampling
        self._asked: list[Prompt] = []
        self._until = 0.0
        self._answers: deque[float] = deque([0.0], maxlen=8)
        self._steps: deque[float] = deque([0.0], maxlen=32)

    def wait(self, busy: int) -> float | None:
        """Return how many seconds to wait for more prompts; None: no limit."""
        if not self._asked:
            return None
        return 0.0 if len(self._asked) >= self._size(busy) else max(0.0, self._until - time.monotonic())

    def submit(self, prompt: Prompt, took: float | None) -> None:
        """Add a prompt to the next batch. `took`: seconds of the environment's step before it."""
        if not self._asked:
            self._until = self._patience()
        self._asked.append(prompt)
        self._steps.extend([] if took is None else [took])

    def advance(self, busy: int) -> _Answered:
        """Answer the oldest prompts as one batch."""
        size = self._size(busy)
        first, self._asked = self._asked[:size], self._asked[size:]
        if not first:
            return []
        began = time.monotonic()
        answers = checked_answers(self._engine, self._engine.generate(first, self._sampling), len(first))
        self._answers.append(time.monotonic() - began)
        self._until = self._patience()
        return list(zip(first, answers, strict=True))

    def close(self) -> None:
        """Do nothing, since no prompt is open between two batches."""

    def _patience(self) -> float:
        """Return the time until which the engine may wait for more prompts."""
        return time.monotonic() + _PATIENCE * median(self._answers)

    def _size(self, busy: int) -> int:
        """Return the largest number of prompts in a batch.

        If one batch held the prompts of all episodes, the engine would be idle while their environments step. If steps
        take longer than answers, smaller batches let some environments step while the engine answers others. Otherwise
        one large batch is faster.
        """
        step, answer = median(self._steps), median(self._answers)
        return busy if step <= answer or answer == 0 else ceil(busy / (1 + ceil(step / answer - _IDLE)))
