"""Points of recorded episodes from which continuations are played, and the continuations on disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import fsum
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
from perturn.types import Trajectory, came_back, failed, unfinished

Kind = Literal["deterministic", "seeded", "open"]
"""How a world answers the actions of an episode that is played again: always the same; the same under the episode's
seed; or not always the same."""


class Point(NamedTuple):
    """A place in a recorded episode from which continuations are played."""

    task: str
    """Id of its task."""
    sample: int
    """Index of the episode among the episodes of the task."""
    turn: int
    """Turns of the episode that come before it."""
    acted: bool = False
    """Whether the action of that turn is repeated first, and the world answers it again."""


@dataclass(frozen=True)
class Continuation:
    """Result of an episode that was continued from a point."""

    task: str
    """Of the point, as the four fields that follow."""
    sample: int
    turn: int
    acted: bool
    number: int
    """Number among the continuations of the point, from 0."""
    reward: float
    """Sum of the rewards from the turn of the point on, in units of reward."""
    success: bool
    turns: int
    """Turns that were played."""
    outcome: str = "counted"
    """counted; failed (the world or the engine raised); or elsewhere (the world did not come back to the point)."""

    @property
    def point(self) -> Point:
        """The point."""
        return Point(self.task, self.sample, self.turn, self.acted)


def read_continuations(file: Path) -> list[Continuation]:
    """Return the continuations of a file; none if there is no file. A last line that was cut short is left out."""
    if not file.is_file():
        return []
    lines = enumerate((raw for _, raw in complete_lines(file, DataError)), start=1)
    return [parse_line(Continuation, raw, f"{file}:{number}") for number, raw in lines]


class ContinuationFile:
    """A file of continuations, open for appending by one process; a line is on the disk when `append` returns."""

    def __init__(self, file: Path) -> None:
        """Open the file, and drop a last line that a kill cut short."""
        self._file = GrowingFile(file, DataError, lambda: None)
        self.found = read_continuations(file)
        """Continuations that were there, and the appended ones."""

    def append(self, one: Continuation) -> None:
        """Write a continuation."""
        self._file.append(line_of(one))
        self.found.append(one)

    def __enter__(self) -> ContinuationFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class Planned(NamedTuple):
    """A continuation to be played."""

    job: Job
    point: Point
    number: int

    def ended(self, played: Trajectory) -> Continuation:
        """Return how it went."""
        turn = self.point.turn
        outcome = "counted" if not failed(played) else "failed" if came_back(played) else "elsewhere"
        reward = fsum(recorded_rewards(played)[turn:]) if outcome == "counted" else 0.0
        own = max(0, len(played.turns) - played.taken_over)
        return Continuation(*self.point, self.number, reward, played.success, own, outcome)


@dataclass(frozen=True)
class Plan:
    """Episodes that are measured, and the points that the advantage of each turn is measured from."""

    episodes: Sequence[Trajectory]
    before: Sequence[Sequence[Point]]
    """Point before each turn of each episode."""
    after: Sequence[Sequence[Point | None]]
    """Point after each turn; None: the episode ended with the turn, so that the value is 0."""
    by_key: dict[tuple[str, int], Trajectory] = field(default_factory=dict)

    @property
    def points(self) -> list[Point]:
        """All points, each once, in the order of the episodes and of the turns."""
        rows = zip(self.before, self.after, strict=True)
        found = [point for pair in rows for both in zip(*pair, strict=True) for point in both]
        return list(dict.fromkeys(point for point in found if point is not None))

    def jobs(self, seed: int, continuations: int, done: Sequence[Continuation]) -> Iterator[Planned]:
        """Yield the continuations that are still to be played.

        The seed of each depends on the run's seed, its point and its number alone. So no credit of the run has seen it,
        and a call that was killed resumes with the same ones.

        Args:
            seed: Of the run.
            continuations: From each point.
            done: Those that were played.
        """
        known = {(one.point, one.number) for one in done}
        samples: dict[str, Iterator[int]] = defaultdict(count)
        for point in self.points:
            begun = self.by_key[point.task, point.sample]
            for number in range(continuations):
                if (point, number) in known:
                    continue
                own = seed_of("measure", seed, *point, number)
                job = Job(
                    begun.task,
                    own,
                    next(samples[point.task]),
                    begun,
                    point.turn + point.acted,
                    anew=point.acted,
                )
                yield Planned(job, point, number)


def plan(episodes: Sequence[Trajectory], kind: Kind) -> Plan:
    """Return the points of episodes.

    - In a deterministic world, the state before a turn follows from the task and the actions so far, so that episodes
      with the same beginning share a point.
    - In a seeded world it follows from the episode's own seed too, and each episode has its own points.
    - In an open world the answer to an action is random, and the point after a turn is the turn repeated.

    Args:
        episodes: Recorded episodes that did not FAIL.
        kind: Of the world.
    """
    known: dict[object, Point] = {}
    before, after = [], list[list[Point | None]]()
    for one in episodes:
        said, seen = actions_of(one), [turn.observation for turn in one.turns]
        own = []
        for turn in range(len(one.turns)):
            point = Point(*one.key, turn)
            history = repr((one.task.id, seen[: turn + 1], said[:turn]))
            own.append(known.setdefault(history, point) if kind == "deterministic" else point)
        before.append(own)
        if kind == "open":
            after.append([point._replace(acted=True) for point in own])
        else:
            last = Point(*one.key, len(own)) if unfinished(one) else None
            after.append([*own[1:], last][: len(own)])
    return Plan(episodes, before, after, {one.key: one for one in episodes})


def choose(explored: Sequence[Trajectory], episodes: int, seed: int) -> list[Trajectory]:
    """Return a number of explored episodes, of as many tasks as possible.

    The first episode of each task comes first, tasks in an order by the seed; a larger number adds episodes and changes
    none. Episodes that FAILED, or have no turn, are not measured.
    """
    usable = sorted((one for one in explored if one.turns and not failed(one)), key=lambda one: one.key)
    rank: dict[str, Iterator[int]] = defaultdict(count)
    order = [(next(rank[one.task.id]), seed_of("measure", seed, one.task.id), one.key, one) for one in usable]
    return [each[-1] for each in sorted(order, key=lambda each: each[:3])][:episodes]
