"""Explore later iterations in the background while the current iteration trains (the setting `staleness`)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from perturn.config.stages import Stage, mark, policy_of
from perturn.data.run_folder import Run
from perturn.data.store import read_trajectories
from perturn.engines.protocol import SwappingEngine
from perturn.engines.shared_engine import Port, SharedEngine
from perturn.episodes.play_many import Job, play
from perturn.episodes.world_threads import Hear
from perturn.errors import RunError
from perturn.run.recorded_episodes import tell_filled
from perturn.run.session import Session, WorldMaker, capacity, world_maker
from perturn.run.stages.branch_stage import explorer_of
from perturn.run.stages.collect_stage import explore_jobs
from perturn.types import Trajectory

_LEAVE_S = 15.0
"""Seconds to wait for background threads to end."""


def look_ahead(session: Session, stage: Stage, planned: Sequence[Stage]) -> None:
    """Start exploring later iterations, or give running explorations the newest policy (only with `staleness`).

    Args:
        session: The run.
        stage: The next stage.
        planned: All stages of this call.
    """
    if not session.recipe.staleness:
        return
    if session.ahead is not None:
        session.ahead.catch_up()
    elif stage.mark:  # a stage of an iteration, but no evaluation
        explores = [
            each
            for each in planned
            if each.name == f"explore{each.mark}" and not session.run.is_done(each.name)
        ]
        session.ahead = Ahead(session, explores)


class Ahead:
    """Plays the exploration stages of a run in background threads, in order, each into its own file.

    The exploration of iteration i begins on two conditions. All episodes of the previous exploration have begun. The
    served policy is at most `staleness` versions older than version i - 1, which iteration i trains. So the lag of each
    token is at most `staleness`. All explorations share the engine and the slots for environments. Each episode names
    the policy that was served when its exploration began, so the episodes of a task form one group. Each token has the
    version of the policy that sampled it.
    """

    def __init__(self, session: Session, stages: Sequence[Stage]) -> None:
        """Open the engine, and begin the first exploration.

        Args:
            session: The session of the run. Its engine is used here until `close`.
            stages: Exploration stages that are not done, in order.

        Raises:
            RunError: If the engine cannot swap weights while it answers.
        """
        self._session, self._recipe = session, session.recipe
        self._version = _newest(session.run)
        engine = session.engine(policy_of(self._recipe, self._version))
        if not isinstance(engine, SwappingEngine):
            raise RunError(
                f"engine {self._recipe.engine['name']!r} cannot go over to other weights while it answers, which "
                "staleness needs; set staleness=0."
            )
        engine.version = self._version
        session.task_lists  # noqa: B018  looked up before threads start
        explorer = explorer_of(self._recipe)
        self._make = world_maker(self._recipe)  # once, since it opens an environment to check the settings
        worlds = capacity(self._recipe, self._make, explorer.concurrency)
        self._slots = threading.Semaphore(min(worlds, explorer.concurrency))
        self._shared = SharedEngine(engine)
        self._lock = threading.RLock()
        self._waiting, self._newest = deque(stages), ""
        self._free = True
        self._threads: list[threading.Thread] = []
        self._found: dict[str, Future[dict[str, int]]] = {}
        self._begin()

    def port(self, policy: str) -> Port:
        """Return an engine that serves the newest policy.

        Raises:
            RunError: If `policy` is not the newest policy.
        """
        if policy != (served := policy_of(self._recipe, self._version)):
            raise RunError(
                f"policy {policy!r} is to act while {served!r} explores; give `perturn evaluate` by itself first."
            )
        return self._shared.port()

    def explored(self, stage: Stage) -> dict[str, int]:
        """Wait until an exploration is complete, and return its counts."""
        run = self._session.run
        file = run.paths.trajectories(stage.name)
        run.expect(file, len(explore_jobs(self._session, stage)), _lines(file))
        counts = self._found[stage.name].result()
        tell_filled("exploration episodes", counts)
        return counts

    def catch_up(self) -> None:
        """Switch the engine to the newest policy, in the middle of episodes.

        Raises:
            RunError: If the engine cannot load the policy's weights in place.
        """
        newest = _newest(self._session.run)
        if newest == self._version:
            return
        policy = policy_of(self._recipe, newest)
        swap = partial(self._shared.swap, version=newest)
        if not self._session.updated(policy, swap):
            raise RunError(f"the engine cannot take the weights of {policy!r} in place; set staleness=0.")
        self._version = newest
        self._begin()

    def close(self) -> None:
        """Stop the running episodes. Finished episodes are stored already."""
        with self._lock:
            self._waiting.clear()
        self._shared.close()
        for thread in self._threads:
            thread.join(_LEAVE_S)

    def _begin(self) -> None:
        """Begin the next exploration if its conditions hold."""
        with self._lock:
            if not (self._free and self._waiting):
                return
            stage = self._waiting[0]
            if stage.iteration - 1 - self._recipe.staleness > self._version:
                return
            self._waiting.popleft()
            self._newest, self._free = stage.name, False
            found = self._found[stage.name] = Future[dict[str, int]]()
            thread = threading.Thread(target=self._explore, args=(stage, found), name=stage.name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _explore(self, stage: Stage, found: Future[dict[str, int]]) -> None:
        """Play an exploration, in its own thread."""
        try:
            counts = self._play(stage)
        except BaseException as error:  # noqa: BLE001  raised in the thread that waits
            found.set_exception(error)
            return
        found.set_result(counts)
        self._make_way(stage)

    def _play(self, stage: Stage) -> dict[str, int]:
        session, recipe, explorer = self._session, self._recipe, explorer_of(self._recipe)
        file, jobs = session.run.paths.trajectories(stage.name), explore_jobs(session, stage)
        port = self._shared.port(_began_with(file))

        def played(
            missing: Sequence[Job], make: WorldMaker, at_once: int, hear: Hear
        ) -> Iterator[Trajectory]:
            jobs = missing if explorer.traits.resumes_earlier else self._handed_out(missing, stage)
            return play(
                jobs,
                port,
                make,
                protocol=session.rules(stage.policy),
                sampling=explorer.sampling,
                concurrency=at_once,
                retries=recipe.worlds.retries,
                slots=self._slots,
            )

        what = "exploration episodes"
        return session.record(file, jobs, played, explorer.concurrency, what, behind=True, make=self._make)

    def _handed_out(self, jobs: Sequence[Job], stage: Stage) -> Iterator[Job]:
        """Yield the jobs. After the last job has begun, the next exploration may use free slots."""
        yield from jobs
        self._make_way(stage)

    def _make_way(self, stage: Stage) -> None:
        with self._lock:
            self._free = self._free or self._newest == stage.name
        self._begin()


def _newest(run: Run) -> int:
    """Return the version of the newest policy, which is the number of the last trained iteration."""
    numbers = range(1, run.recipe.iterations + 1)
    return max((each for each in numbers if run.is_done(f"align{mark(run.recipe, each)}")), default=0)


def _began_with(file: Path) -> str:
    """Return the policy that stored episodes name, so that new episodes join their groups; "" without episodes."""
    return next((one.policy for one in read_trajectories(file)), "") if file.is_file() else ""


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.is_file() else 0
