"""Drive many episodes against an engine at once (`play`); `episode` is one, without model I/O."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from math import ceil
from queue import Empty, SimpleQueue
from statistics import median

from perturn.episodes.episode import Episode as Episode
from perturn.episodes.episode import Job as Job
from perturn.episodes.episode import episode as episode
from perturn.errors import BystanderLost, EngineFailure, WorldLost
from perturn.faults import close_world
from perturn.types import (
    Action,
    Engine,
    Environment,
    EpisodeProtocol,
    Prompt,
    Sampling,
    Status,
    StreamingEngine,
    Trajectory,
)

_logger = logging.getLogger(__name__)

_PATIENCE = 0.2
"""How long the engine waits for more prompts, as a share of the time that a batch takes."""
_IDLE = 0.25
"""Time that the engine may be idle for each second that it works, where worlds take longer than it."""
_LEAVE_S = 10.0
"""Seconds that worlds have to end when the play is over."""
_BYSTANDER_LIMIT = 16
"""How often an episode is played again because of other worlds."""


def play_again(play_once: Callable[[], Trajectory], retries: int) -> Trajectory:
    """Play an episode, and again if its world died or hung; the last trajectory counts.

    Args:
        play_once: Plays it.
        retries: How often it is played again. Losses to another world's fault are not counted, up to a bound.
    """
    bystander = 0
    while True:
        trajectory = play_once()
        kind = (trajectory.error or "").partition(":")[0]
        if kind == BystanderLost.__name__ and bystander < _BYSTANDER_LIMIT:
            bystander += 1
        elif kind in (WorldLost.__name__, BystanderLost.__name__) and retries > 0:
            retries -= 1
        else:
            return trajectory
        _logger.warning("playing task %s again: %s", trajectory.task.id, trajectory.error)


def play(
    jobs: Iterable[Job],
    engine: Engine,
    make_environment: Callable[[], Environment],
    *,
    protocol: EpisodeProtocol,
    sampling: Sampling,
    concurrency: int = 16,
    retries: int = 1,
) -> Iterator[Trajectory]:
    """Play many episodes at once; each trajectory is handed out as soon as its episode ends.

    Each world lives in a thread of its own: it is made, stepped and closed there, while the engine answers the prompts
    that are ready in the thread that consumes the trajectories. The engine never waits for the slowest world: a
    streaming one takes prompts on as they come; any other goes ahead once waiting for more would cost more than a
    fifth of the time of a batch. So the order of trajectories and the batches depend on timing; an answer does not,
    but for rounding (see `Prompt.seed`).

    Args:
        jobs: Episodes to play, in order of start.
        engine: Answers prompts.
        make_environment: Starts a world, in any thread. At most `concurrency` are alive; a world whose episode
            failed is replaced.
        protocol: Rules to play by.
        sampling: How actions are decoded.
        concurrency: Episodes running at the same time.
        retries: How often an episode whose world died or hung (`WorldLost`) is played again.
    """
    workers = _Workers(iter(jobs), lambda env, job: episode(env, job, protocol=protocol, policy=engine.name))
    counter: _Stream | _Batches = _Batches(engine, sampling)
    if isinstance(engine, StreamingEngine):
        counter = _Stream(engine, sampling)
    asked: dict[str, _Worker] = {}
    try:
        workers.open(concurrency, make_environment, retries)
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
) -> Iterator[Trajectory]:
    """Play many episodes that ask no engine, such as an expert's, at once; see `play`.

    Args:
        jobs: Episodes to play, in order of start.
        start: Starts an episode of a job in a world; it ends without a prompt.
        make_environment: Starts a world, in any thread.
        concurrency: Episodes running at the same time.
        retries: How often an episode whose world died or hung (`WorldLost`) is played again.
    """
    workers = _Workers(iter(jobs), start)
    try:
        workers.open(concurrency, make_environment, retries)
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
        """Seconds that more may be waited for; None: as long as it takes."""
        return 0.0 if self._open else None

    def submit(self, prompt: Prompt, took: float | None) -> None:
        """Pass a prompt on."""
        self._engine.submit([prompt], self._sampling)
        self._open += 1

    def advance(self, busy: int) -> _Answered:
        """Have the engine work for a moment; what it has answered."""
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
        """Seconds that more may be waited for; None: as long as it takes."""
        if not self._asked:
            return None
        return 0.0 if len(self._asked) >= self._size(busy) else max(0.0, self._until - time.monotonic())

    def submit(self, prompt: Prompt, took: float | None) -> None:
        """Gather a prompt, which came after a step of so many seconds."""
        if not self._asked:
            self._until = self._patience()
        self._asked.append(prompt)
        self._steps.extend([] if took is None else [took])

    def advance(self, busy: int) -> _Answered:
        """Answer those who have asked first."""
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
        """Until when the engine may wait for more prompts."""
        return time.monotonic() + _PATIENCE * median(self._answers)

    def _size(self, busy: int) -> int:
        """How many prompts to answer together, at most.

        If all episodes were answered together, the engine would be idle while their worlds step. Where that takes
        longer than the answers, they are answered in groups, as many as it takes for some to step behind the others.
        Otherwise larger batches are worth more than the wait.
        """
        step, answer = median(self._steps), median(self._answers)
        return busy if step <= answer or answer == 0 else ceil(busy / (1 + ceil(step / answer - _IDLE)))


_Said = tuple["_Worker", "Prompt | Trajectory | BaseException"]


class _Workers:
    """All worker threads, and the one queue of what they say."""

    def __init__(self, jobs: Iterator[Job], start: Callable[[Environment, Job], Episode]) -> None:
        self.start = start
        self.said: SimpleQueue[_Said] = SimpleQueue()
        self.busy = 0
        self._jobs = jobs
        self._workers: list[_Worker] = []

    def open(self, count: int, make: Callable[[], Environment], retries: int) -> None:
        """Start at most so many workers, each with its first episode."""
        for job in islice(self._jobs, count):
            self._workers.append(_Worker(self, make, retries))
            self._give(self._workers[-1], job)

    def listen(self, wait: Callable[[int], float | None]) -> Iterator[tuple[_Worker, Prompt | Trajectory]]:
        """Hear all workers; those whose episode ended play on before it is handed out.

        `wait` says for how many seconds, from the number of running episodes, and is asked again after each word.
        """
        while self.busy:
            try:
                worker, said = self.said.get(timeout=wait(self.busy))
            except Empty:
                return
            if isinstance(said, BaseException):
                raise said
            if isinstance(said, Trajectory):
                self.busy -= 1
                for job in islice(self._jobs, 1):
                    self._give(worker, job)
                if said.status is Status.FAILED:
                    _logger.warning("episode of task %s failed: %s", said.task.id, said.error)
            yield worker, said

    def close(self) -> None:
        """Have all worlds closed in their threads; those that hang are left behind."""
        for worker in self._workers:
            worker.inbox.put(None)
        until = time.monotonic() + _LEAVE_S
        for worker in self._workers:
            worker.thread.join(max(0.0, until - time.monotonic()))

    def _give(self, worker: _Worker, job: Job) -> None:
        self.busy += 1
        worker.inbox.put(job)


class _Stopped(Exception):
    """Nobody wants the rest of the episode."""


class _Worker:
    """A thread in which one world after the other plays one episode after the other."""

    def __init__(self, workers: _Workers, make: Callable[[], Environment], retries: int) -> None:
        self.inbox: SimpleQueue[Job | Action | EngineFailure | None] = SimpleQueue()
        self._workers = workers
        self._make = make
        self._retries = retries
        self._env: Environment | None = None
        self.took: float | None = None
        """Seconds of the world's last step, if there was one."""
        self.thread = threading.Thread(target=self._work, name="world", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            while isinstance(job := self.inbox.get(), Job):
                self._workers.said.put((self, play_again(partial(self._play, job), self._retries)))
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  raised where the trajectories are consumed
            self._workers.said.put((self, error))
        finally:
            self._leave()

    def _play(self, job: Job) -> Trajectory:
        """Play one episode; its world is used again unless the episode failed."""
        if self._env is None:
            self._env = self._make()
        steps = self._workers.start(self._env, job)
        self.took = None
        try:
            prompt = next(steps)
            while True:
                self._workers.said.put((self, prompt))
                answer = self.inbox.get()
                began = time.monotonic()
                if isinstance(answer, EngineFailure):
                    prompt = steps.throw(answer)
                elif isinstance(answer, Action):
                    prompt = steps.send(answer)
                else:
                    raise _Stopped
                self.took = time.monotonic() - began
        except StopIteration as end:
            trajectory: Trajectory = end.value
        if trajectory.status is Status.FAILED:
            self._leave()
        return trajectory

    def _leave(self) -> None:
        """Close the world, if there is one."""
        env, self._env = self._env, None
        if env is not None:
            close_world(env)
