"""Drive many episodes against an engine at once (`play`); `episode` is one, without model I/O."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import ceil
from statistics import median
from threading import Semaphore

from perturn.episodes.engine_abilities import abilities_of
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
"""How long the engine waits for more prompts, as a share of the time that a batch takes."""
_IDLE = 0.25
"""Time that the engine may be idle for each second that it works, where worlds take longer than it."""


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
    """Play many episodes at once; each trajectory is handed out as soon as its episode ends.

    Each world lives in its own thread: it is made, stepped and closed there, while the engine answers the prompts that
    are ready in the thread that consumes the trajectories. The engine never waits for the slowest world: a streaming
    one takes prompts on as they come; any other goes ahead once waiting for more would cost more than a fifth of the
    time of a batch. So the order of trajectories and the batches depend on timing; an answer does not, up to rounding
    (see `Prompt.seed`).

    Args:
        jobs: Episodes to play, in order of start.
        engine: Answers prompts.
        make_environment: Starts a world, in any thread. At most `concurrency` are alive; a world whose episode
            failed is replaced.
        protocol: Rules to play by.
        sampling: How actions are decoded.
        concurrency: Episodes running at the same time.
        retries: How often an episode whose world died or hung (`WorldLost`) is played again.
        hear: Told of each prompt and of each trajectory, so that progress can be measured in turns.
        slots: Slots for open worlds, one each, which several plays at the same time share; None: there are enough.
    """
    coming = iter(jobs)
    abilities = abilities_of(engine)

    def start(env: Environment, job: Job) -> Episode:
        name = engine.name  # which may change meanwhile
        return episode(env, job, protocol=protocol, policy=name, abilities=abilities)

    workers = Workers(start, make_environment, retries, coming, hear, slots)
    counter: _Stream | _Batches = _Batches(engine, sampling)
    if isinstance(engine, StreamingEngine):
        counter = _Stream(engine, sampling)
    asked: dict[str, Worker] = {}
    try:
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
    finally:
        workers.close()


def play_alone(
    jobs: Iterable[Job],
    start: Callable[[Environment, Job], Episode],
    make_environment: Callable[[], Environment],
    *,
    concurrency: int = 16,
    retries: int = 1,
    hear: Hear = ignore,
) -> Iterator[Trajectory]:
    """Play many episodes that ask no engine, such as an expert's, at once; see `play`.

    Args:
        jobs: Episodes to play, in order of start.
        start: Starts an episode of a job in a world; it ends without a prompt.
        make_environment: Starts a world, in any thread.
        concurrency: Episodes running at the same time.
        retries: How often an episode whose world died or hung (`WorldLost`) is played again.
        hear: Told of each prompt and of each trajectory, so that progress can be measured in turns.
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
    """Prompts go to an engine that takes them on while it answers others."""

    def __init__(self, engine: StreamingEngine, sampling: Sampling) -> None:
        self._engine, self._sampling = engine, sampling
        self._open = 0

    def wait(self, busy: int) -> float | None:
        """Return seconds that more may be waited for; None: as long as it takes."""
        return 0.0 if self._open else None

    def submit(self, prompt: Prompt, took: float | None) -> None:
        """Pass a prompt on."""
        self._engine.submit([prompt], self._sampling)
        self._open += 1

    def advance(self, busy: int) -> _Answered:
        """Let the engine work for a moment, and return its answers."""
        answered = self._engine.advance() if self._open else []
        self._open -= len(answered)
        return answered


class _Batches:
    """Prompts are gathered for an engine that answers them together: when to ask it, and how many at a time."""

    def __init__(self, engine: Engine, sampling: Sampling) -> None:
        self._engine, self._sampling = engine, sampling
        self._asked: list[Prompt] = []
        self._until = 0.0
        self._answers: deque[float] = deque([0.0], maxlen=8)
        self._steps: deque[float] = deque([0.0], maxlen=32)

    def wait(self, busy: int) -> float | None:
        """Return seconds that more may be waited for; None: as long as it takes."""
        if not self._asked:
            return None
        return 0.0 if len(self._asked) >= self._size(busy) else max(0.0, self._until - time.monotonic())

    def submit(self, prompt: Prompt, took: float | None) -> None:
        """Gather a prompt, which came after a step of the given seconds."""
        if not self._asked:
            self._until = self._patience()
        self._asked.append(prompt)
        self._steps.extend([] if took is None else [took])

    def advance(self, busy: int) -> _Answered:
        """Answer the earliest prompts."""
        size = self._size(busy)
        first, self._asked = self._asked[:size], self._asked[size:]
        if not first:
            return []
        began = time.monotonic()
        answers = self._engine.generate(first, self._sampling)
        self._answers.append(time.monotonic() - began)
        self._until = self._patience()
        return list(zip(first, answers, strict=True))

    def _patience(self) -> float:
        """Return the time until which the engine may wait for more prompts."""
        return time.monotonic() + _PATIENCE * median(self._answers)

    def _size(self, busy: int) -> int:
        """Return how many prompts to answer together, at most.

        If all episodes were answered together, the engine would be idle while their worlds step. If steps
        take longer than answers, prompts are answered in groups, so that some worlds step while others are
        answered. Otherwise larger batches are worth more than the wait.
        """
        step, answer = median(self._steps), median(self._answers)
        return busy if step <= answer or answer == 0 else ceil(busy / (1 + ceil(step / answer - _IDLE)))
