"""Worker threads that play episodes, and the queue that receives their messages."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from threading import Semaphore

from perturn.episodes.episode import Episode, Job
from perturn.errors import BystanderLost, EngineFailure, RunError, WorldLost
from perturn.faults import close_world
from perturn.io.plain_data import named_error, visible
from perturn.types import Action, Environment, Observation, Prompt, Status, Task, Trajectory

_logger = logging.getLogger(__name__)

_LEAVE_S = 10.0
"""Seconds to wait for worker threads to end when the play is over."""
_PLENTY = 2**31
"""Number of slots if no other play shares them."""
_LOOK_S = 0.2
"""Seconds after which a worker that waits for a slot checks whether the play is over."""
_TOLD = 10
"""Largest number of warnings of episodes that failed with the same kind of error."""
_BYSTANDER_LIMIT = 16
"""Largest number of replays of an episode because another environment failed."""


def play_again(play_once: Callable[[], Trajectory], retries: int) -> Trajectory:
    """Play an episode, and replay it if its environment died or hung; return the last trajectory.

    Args:
        play_once: Function that plays the episode once.
        retries: Largest number of replays. Replays because another environment failed do not count; they have a limit
            of their own.
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
        _logger.warning(
            "playing task %s again: %s", visible(trajectory.task.id), visible(str(trajectory.error))
        )


Said = tuple["Worker", "Prompt | Trajectory | BaseException"]
Hear = Callable[["Prompt | Trajectory"], None]
"""Callback for each prompt that an episode yields, and for each trajectory when its episode ends."""


def ignore(said: Prompt | Trajectory) -> None:
    """Do nothing with a prompt or trajectory."""


class Workers:
    """All worker threads of a play, and the queue that receives their messages."""

    def __init__(
        self,
        start: Callable[[Environment, Job], Episode],
        make: Callable[[], Environment],
        retries: int,
        jobs: Iterator[Job] | None = None,
        hear: Hear = ignore,
        slots: Semaphore | None = None,
    ) -> None:
        """Create the queue without workers.

        Args:
            start: Function that starts an episode for a job in an environment.
            make: Starts an environment, in any thread.
            retries: Number of times to replay an episode whose environment died or hung.
            jobs: Next jobs, for workers whose episode has ended. When no job is left, a worker closes its environment.
                None: workers keep their environments and wait for the next `begin`.
            hear: Callback for each prompt and trajectory, called in the thread that listens.
            slots: Semaphore that several plays share to limit their open environments. A worker holds a slot as long as
                it runs. None: no limit.
        """
        self.start, self.make, self.retries, self.hear = start, make, retries, hear
        self.slots = Semaphore(_PLENTY) if slots is None else slots
        self.said: SimpleQueue[Said] = SimpleQueue()
        self.busy, self.over = 0, False
        self._jobs = jobs
        self._workers: list[Worker] = []
        self._told: Counter[str] = Counter()

    def begin(self, jobs: Iterable[Job]) -> None:
        """Play the given jobs at the same time; start more workers as needed."""
        for number, job in enumerate(jobs):
            if number == len(self._workers):
                self._workers.append(Worker(self))
            self._give(self._workers[number], job)

    def listen(self, wait: Callable[[int], float | None]) -> Iterator[tuple[Worker, Prompt | Trajectory]]:
        """Yield the messages of the workers. When an episode ends, its worker starts the next job at once.

        `wait` maps the number of running episodes to the seconds to wait for the next message. `wait` is called again
        for each message.
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
                    self._warn(said)
            self.hear(said)
            yield worker, said

    def _warn(self, failed: Trajectory) -> None:
        """Warn of a FAILED episode. The first few with the same kind of error are enough."""
        kind = str(failed.error).partition(":")[0]
        self._told[kind] += 1
        if self._told[kind] <= _TOLD:
            _logger.warning(
                "episode of task %s failed: %s", visible(failed.task.id), visible(str(failed.error))
            )
        if self._told[kind] == _TOLD:
            _logger.warning("further episodes that fail with %s are not listed here", visible(kind))

    def close(self) -> None:
        """Close all environments in their threads. An environment that hangs is abandoned."""
        self.over = True
        for worker in self._workers:
            worker.inbox.put(None)
        until = time.monotonic() + _LEAVE_S
        for worker in self._workers:
            worker.thread.join(max(0.0, until - time.monotonic()))

    def _go_on(self, worker: Worker, job: Job | None) -> None:
        """Give a worker its next job, or tell it to end."""
        if job is None:
            worker.inbox.put(None)
        else:
            self._give(worker, job)

    def _give(self, worker: Worker, job: Job) -> None:
        self.busy += 1
        worker.inbox.put(job)


class _Stopped(Exception):
    """Raised in a worker whose episode is no longer wanted."""


class _NotMade:
    """Stands in for an environment that could not be made; its `reset` raises `WorldLost`."""

    def __init__(self, name: str, why: BaseException) -> None:
        self.name, self._why = name, why

    def reset(self, task: Task, seed: int) -> Observation:
        raise WorldLost(f"no new environment could be made: {named_error(self._why)}") from self._why

    def tasks(self, split: str) -> Sequence[Task]:
        return ()

    def step(self, action: str) -> Observation:
        return self.reset(Task(""), 0)

    def close(self) -> None:
        """Do nothing."""


class Worker:
    """A thread that plays one episode after another, in one environment at a time."""

    def __init__(self, workers: Workers) -> None:
        self.inbox: SimpleQueue[Job | Action | EngineFailure | None] = SimpleQueue()
        self._workers = workers
        self._env: Environment | None = None
        self._name: str | None = None
        self.took: float | None = None
        """Seconds of the environment's last step; None before the first step."""
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
        except BaseException as error:  # noqa: BLE001  it is raised in the thread that consumes the trajectories
            self._workers.said.put((self, error))
        finally:
            self._leave()
            slots.release()

    def _play(self, job: Job) -> Trajectory:
        """Play one episode. The next episode uses the same environment unless this episode FAILED."""
        if self._env is None:
            self._env = self._open()
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

    def _open(self) -> Environment:
        """Make an environment. An error ends the run if it is the worker's first environment, else only an episode."""
        try:
            env = self._workers.make()
        except (RunError, KeyboardInterrupt):
            raise
        except BaseException as error:
            if self._name is None:
                raise
            return _NotMade(self._name, error)
        self._name = env.name
        return env

    def _leave(self) -> None:
        """Close the environment, if there is one."""
        env, self._env = self._env, None
        if env is not None:
            close_world(env)
