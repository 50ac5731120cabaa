"""Find the points of recorded episodes from which continuations are played, and store the continuations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from math import fsum, inf
from pathlib import Path
from typing import Literal, NamedTuple

from perturn.credit.returns import recorded_rewards
from perturn.data.origins import actions_of
from perturn.data.records import line_of, parse_line
from perturn.episodes.episode import Job
from perturn.episodes.seeds import seed_of
from perturn.errors import DataError
from perturn.io.append_file import GrowingFile
from perturn.io.read_input import complete_lines
from perturn.types import Trajectory, came_elsewhere, failed, unfinished

Kind = Literal["deterministic", "seeded", "open"]
"""How an environment answers when an episode's actions are replayed: always equally (`deterministic`), equally under
the same seed (`seeded`), or with variation (`open`)."""


_MOST = 1 << 20
"""Number that turns of an episode, and continuations of a point, stay below."""


class Point(NamedTuple):
    """State in a recorded episode from which continuations are played."""

    task: str
    """Id of the episode's task."""
    sample: int
    """Index of the episode among the episodes of the task."""
    turn: int
    """Number of turns of the episode before the point."""
    acted: bool = False
    """Whether a continuation first repeats the recorded action of the next turn, to which the environment answers
    again."""

    def sample_of(self, number: int) -> int:
        """Return the sample number of a continuation. It differs from all others of the task."""
        return ((self.sample * _MOST + self.turn) * 2 + self.acted) * _MOST + number


@dataclass(frozen=True)
class Continuation:
    """Result of one continuation of an episode from a point."""

    task: str
    """Id of the task. This field and the next three are the fields of the `Point`."""
    sample: int
    turn: int
    acted: bool
    number: int
    """Number of the continuation among all continuations of its point, from 0."""
    reward: float
    """Sum of rewards after the point, in units of reward."""
    success: bool
    turns: int
    """Number of turns that were played."""
    outcome: str = "counted"
    """`counted`; `failed`, if the environment or the engine raised an error; or `elsewhere`, if the environment did not
    return to the state of the point."""
    tries: int = 1
    """Number of times that it was played. `outcome` is the result of the last time."""

    @property
    def point(self) -> Point:
        """Point of the continuation."""
        return Point(self.task, self.sample, self.turn, self.acted)


def read_continuations(file: Path) -> list[Continuation]:
    """Return the continuations in a file; empty if the file does not exist. An incomplete last line is ignored.

    If a continuation was played again, the last result is returned.
    """
    if not file.is_file():
        return []
    lines = enumerate((raw for _, raw in complete_lines(file, DataError)), start=1)
    every = (parse_line(Continuation, raw, f"{file}:{number}") for number, raw in lines)
    return list({(one.point, one.number): one for one in every}.values())


class ContinuationFile:
    """File of continuations that one process appends to. A line is on disk when `append` returns."""

    def __init__(self, file: Path) -> None:
        """Open the file, and remove an incomplete last line."""
        self._file = GrowingFile(file, DataError, lambda: None)
        self._found = {(one.point, one.number): one for one in read_continuations(file)}

    @property
    def found(self) -> list[Continuation]:
        """Continuations in the file, including appended ones."""
        return list(self._found.values())

    def append(self, one: Continuation) -> None:
        """Append a continuation, which replaces its earlier result."""
        self._file.append(line_of(one))
        self._found[one.point, one.number] = one

    def drop_failed(self, tries: float = inf) -> dict[tuple[Point, int], int]:
        """Forget FAILED continuations that were played at most `tries` times, so that they are played again.

        The file keeps them until then.

        Returns:
            Point and number of each of these continuations -> number of times that it was played.
        """
        failed = {
            key: one for key, one in self._found.items() if one.outcome == "failed" and one.tries <= tries
        }
        self._found = {key: one for key, one in self._found.items() if key not in failed}
        return {key: one.tries for key, one in failed.items()}

    def __enter__(self) -> ContinuationFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class Planned(NamedTuple):
    """A continuation to play."""

    job: Job
    point: Point
    number: int

    def ended(self, played: Trajectory) -> Continuation:
        """Return the result of the continuation from its finished episode."""
        turn = self.point.turn
        outcome = "counted" if not failed(played) else "elsewhere" if came_elsewhere(played) else "failed"
        reward = fsum(recorded_rewards(played)[turn:]) if outcome == "counted" else 0.0
        own = max(0, len(played.turns) - played.taken_over)
        return Continuation(*self.point, self.number, reward, played.success, own, outcome)


@dataclass(frozen=True)
class Plan:
    """Episodes to measure, and the points from which the advantage of each turn is measured."""

    episodes: Sequence[Trajectory]
    before: Sequence[Sequence[Point]]
    """Point before each turn of each episode."""
    after: Sequence[Sequence[Point | None]]
    """Point after each turn of each episode. None means that the episode ended with the turn, so that the value is
    0."""
    by_key: dict[tuple[str, int], Trajectory] = field(default_factory=dict)

    @property
    def points(self) -> list[Point]:
        """All distinct points, in the order of the episodes and turns."""
        rows = zip(self.before, self.after, strict=True)
        found = [point for pair in rows for both in zip(*pair, strict=True) for point in both]
        return list(dict.fromkeys(point for point in found if point is not None))

    def jobs(self, seed: int, continuations: int, done: Sequence[Continuation]) -> Iterator[Planned]:
        """Yield the continuations that are not played yet.

        The seed of a continuation depends only on the run's seed, its point and its number. Its sample number depends
        only on its point and its number. So a call that was killed resumes with the same continuations, also if the
        next call asks for more of them. No credit of the run has used this seed.

        Args:
            seed: Seed of the run.
            continuations: Number of continuations from each point.
            done: Continuations that are already played.
        """
        known = {(one.point, one.number) for one in done}
        for point in self.points:
            begun = self.by_key[point.task, point.sample]
            for number in range(continuations):
                if (point, number) in known:
                    continue
                own = seed_of("measure", seed, *point, number)
                job = Job(
                    begun.task,
                    own,
                    point.sample_of(number),
                    begun,
                    point.turn + point.acted,
                    anew=point.acted,
                )
                yield Planned(job, point, number)


def plan(episodes: Sequence[Trajectory], kind: Kind) -> Plan:
    """Return the points of recorded episodes, by the kind of the environment.

    - In a deterministic environment, the state before a turn follows from the task and the earlier actions. So episodes
      with the same first turns share points.
    - In a seeded environment, the state also depends on the seed of the episode. So each episode has its own points.
    - In an open environment, the answer to an action is random. So the point after a turn lies before the turn, and its
      continuations repeat the action first.

    Args:
        episodes: Recorded episodes that did not FAIL.
        kind: Kind of the environment.
    """
    known: dict[bytes, Point] = {}
    before, after = [], list[list[Point | None]]()
    for one in episodes:
        own = [Point(*one.key, turn) for turn in range(len(one.turns))]
        if kind == "deterministic":
            own = [
                known.setdefault(each, point) for (each, _), point in zip(histories(one), own, strict=True)
            ]
        before.append(own)
        if kind == "open":
            after.append([point._replace(acted=True) for point in own])
        else:
            last = Point(*one.key, len(own)) if unfinished(one) else None
            after.append([*own[1:], last][: len(own)])
    return Plan(episodes, before, after, {one.key: one for one in episodes})


def histories(one: Trajectory) -> Iterator[tuple[bytes, bytes]]:
    """Yield two digests for each turn of an episode: of all that was said before its action, and with its action."""
    digest = sha256(repr((one.task.id, one.prompt, one.tools, one.template_kwargs)).encode())
    for turn, action in zip(one.turns, actions_of(one), strict=True):
        digest.update(repr((turn.observation, turn.follows, turn.opening)).encode())
        before = digest.digest()
        digest.update(repr(action).encode())
        yield before, digest.digest()


def choose(explored: Sequence[Trajectory], episodes: int, seed: int) -> list[Trajectory]:
    """Choose a number of explored episodes from as many tasks as possible.

    The first episode of every task is chosen before the second episode of any task. The seed gives the order of the
    tasks. A larger number only adds episodes. Episodes that FAILED or have no turn are never chosen.
    """
    usable = sorted((one for one in explored if one.turns and not failed(one)), key=lambda one: one.key)
    rank: dict[str, Iterator[int]] = defaultdict(count)
    order = [(next(rank[one.task.id]), seed_of("measure", seed, one.task.id), one.key, one) for one in usable]
    return [each[-1] for each in sorted(order, key=lambda each: each[:3])][:episodes]
