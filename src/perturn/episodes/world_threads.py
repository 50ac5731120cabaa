"""Threads in which worlds play episodes, and the one queue of their messages."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from queue import Empty, SimpleQueue
from threading import Semaphore

from perturn.episodes.episode import Episode, Job
from perturn.errors import BystanderLost, EngineFailure, WorldLost
from perturn.faults import close_world
from perturn.types import Action, Environment, Prompt, Status, Trajectory

_logger = logging.getLogger(__name__)

_LEAVE_S = 10.0
"""Seconds that worlds have to end when the play is over."""
_PLENTY = 2**31
"""Slots where no other play has worlds."""
_LOOK_S = 0.2
"""Seconds after which a worker that waits for a slot looks whether the play is over."""
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


Said = tuple["Worker", "Prompt | Trajectory | BaseException"]
Hear = Callable[["Prompt | Trajectory"], None]
"""Told of each prompt as an episode asks it, and of each trajectory as its episode ends."""


def ignore(said: Prompt | Trajectory) -> None:
    """Take no note."""


class Workers:
    """All worker threads, and the one queue of their messages."""

    def __init__(
        self,
        start: Callable[[Environment, Job], Episode],
        make: Callable[[], Environment],
        retries: int,
        jobs: Iterator[Job] | None = None,
        hear: Hear = ignore,
        slots: Semaphore | None = None,
    ) -> None:
        """Start without workers.

        Args:
            start: Starts an episode of a job in a world.
            make: Starts a world, in any thread.
            retries: How often an episode whose world died or hung is played again.
            jobs: Given to those whose episode has ended, which close their world if there is none left; None: they
                keep it and wait for the next `begin`.
            hear: Told all that is said, in the thread that listens.
            slots: Slots for worlds, where several plays share some; a worker holds one as long as it has a world.
        """
        self.start, self.make, self.retries, self.hear = start, make, retries, hear
        self.slots = Semaphore(_PLENTY) if slots is None else slots
        self.said: SimpleQueue[Said] = SimpleQueue()
        self.busy, self.over = 0, False
        self._jobs = jobs
        self._workers: list[Worker] = []

    def begin(self, jobs: Iterable[Job]) -> None:
        """Play these all at the same time; workers are started as needed."""
        for number, job in enumerate(jobs):
            if number == len(self._workers):
                self._workers.append(Worker(self))
            self._give(self._workers[number], job)

    def listen(self, wait: Callable[[int], float | None]) -> Iterator[tuple[Worker, Prompt | Trajectory]]:
        """Hear all workers; workers whose episode ended play the next one before it is handed out.

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
                if self._jobs is not None:
                    self._go_on(worker, next(self._jobs, None))
                if said.status is Status.FAILED:
                    _logger.warning("episode of task %s failed: %s", said.task.id, said.error)
            self.hear(said)
            yield worker, said

    def close(self) -> None:
        """Have all worlds closed in their threads; a world that hangs is abandoned."""
        self.over = True
        for worker in self._workers:
            worker.inbox.put(None)
        until = time.monotonic() + _LEAVE_S
        for worker in self._workers:
            worker.thread.join(max(0.0, until - time.monotonic()))

    def _go_on(self, worker: Worker, job: Job | None) -> None:
        """Give a worker its next job, or have it end."""
        if job is None:
            worker.inbox.put(None)
        else:
            self._give(worker, job)

    def _give(self, worker: Worker, job: Job) -> None:
        self.busy += 1
        worker.inbox.put(job)


class _Stopped(Exception):
    """Nobody wants the rest of the episode."""


class Worker:
    """A thread in which one world after the other plays one episode after the other."""

    def __init__(self, workers: Workers) -> None:
        self.inbox: SimpleQueue[Job | Action | EngineFailure | None] = SimpleQueue()
        self._workers = workers
        self._env: Environment | None = None
        self.took: float | None = None
        """Seconds of the world's last step, if there was one."""
        self.thread = threading.Thread(target=self._work, name="world", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        slots = self._workers.slots
        while not slots.acquire(timeout=_LOOK_S):
            if self._workers.over:
                return
        try:
            while isinstance(job := self.inbox.get(), Job):
                self._workers.said.put((self, play_again(partial(self._play, job), self._workers.retries)))
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  raised where the trajectories are consumed
            self._workers.said.put((self, error))
        finally:
            self._leave()
            slots.release()

    def _play(self, job: Job) -> Trajectory:
        """Play one episode; its world is used again unless the episode failed."""
        if self._env is None:
            self._env = self._workers.make()
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
