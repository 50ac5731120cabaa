"""A simulation of the online loop: how long its iterations take where exploration and training overlap.

Its events are the ends of answers, of steps of the environment, and of trainings.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from statistics import fmean

Draw = Callable[[Random], float]
"""Draws a number, in seconds unless it says otherwise."""
Turns = Sequence[tuple[float, float]]
"""Seconds of each answer of an episode, and of the step of the environment that follows."""
Play = Callable[[Random], Turns]
"""Draws an episode."""


@dataclass(frozen=True)
class Loop:
    """An online run, as `staleness` orders it."""

    iterations: int
    episodes: int
    """Episodes of an iteration."""
    slots: int
    """Episodes that are played at the same time."""
    train: float
    """Seconds from the last episode of an iteration to its policy: credit, training, and handing over the weights."""
    staleness: int = 0
    score: float = 0.0
    """Seconds of an evaluation; none is explored for the next iteration before it with staleness 0."""
    replicas: int = 1
    """Copies of the policy that answer; a conversation stays with one of them."""
    at_once: int | None = None
    """Answers that a replica gives at the same time, the others wait; None: all, each in its own time."""


@dataclass(frozen=True)
class Timeline:
    """Moments of a simulated run, in seconds from its beginning."""

    seconds: float
    """End of the last iteration."""
    waiting: float
    """Share of the time in which the trainer waits for episodes."""
    idle: float
    """Share of the slots' time in which no episode is played."""


def episode_turns(turns: Draw, answer: Draw, step: Draw, start: float = 0.0) -> Play:
    """Return a draw of the turns of an episode.

    Args:
        turns: Draws the number of turns.
        answer: Draws the seconds of an answer, once a replica has begun with it.
        step: Draws the seconds of a step of the environment.
        start: Seconds in which an episode begins.
    """
    return lambda random: (
        (0.0, start),
        *((answer(random), step(random)) for _ in range(round(turns(random)))),
    )


def simulate(loop: Loop, episode: Play, seed: int = 0) -> Timeline:
    """Simulate a run whose episodes have the number of turns that `episode` draws.

    The episodes of an iteration begin in order, each in the first free slot. They begin once all episodes of the
    previous iteration have begun, and once the policy `staleness` versions before theirs is trained.
    """
    return _Run(loop, episode, Random(seed)).timeline()


def expected_seconds(loop: Loop, episode: Play) -> float:
    """Return the mean seconds of some simulated runs."""
    return fmean(simulate(loop, episode, seed).seconds for seed in range(20))


@dataclass
class _Played:
    """An episode that is played."""

    iteration: int
    replica: int
    began: float
    left: deque[tuple[float, float]]


@dataclass
class _Run:
    """A run that is simulated, from event to event."""

    loop: Loop
    episode: Play
    random: Random
    now: float = 0.0
    begun: int = 0
    busy: int = 0
    """Slots in which an episode is played."""
    played: float = 0.0
    waited: float = 0.0
    trained: list[float] = field(default_factory=lambda: [0.0])
    """Moment of each policy, from the first one on."""

    def __post_init__(self) -> None:
        """Nothing has happened."""
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.number = count()
        self.open = [self.loop.episodes] * self.loop.iterations
        self.answering = [0] * self.loop.replicas
        self.queues: list[deque[_Played]] = [deque() for _ in range(self.loop.replicas)]

    def timeline(self) -> Timeline:
        """Play all events."""
        self.begin()
        while self.events:
            self.now, _, happens = heapq.heappop(self.events)
            happens()
        end = self.trained[-1]
        return Timeline(end, self.waited / end, 1 - self.played / (self.loop.slots * end))

    def after(self, seconds: float, happens: Callable[[], None]) -> None:
        """Schedule an event after a number of seconds."""
        heapq.heappush(self.events, (self.now + seconds, next(self.number), happens))

    def begin(self) -> None:
        """Begin episodes, as long as there are slots and policies for them."""
        loop = self.loop
        while self.busy < loop.slots and self.begun < loop.iterations * loop.episodes:
            iteration = self.begun // loop.episodes
            needed = max(0, iteration - loop.staleness)
            if needed >= len(self.trained) or self.trained[needed] > self.now:
                return  # a training that ends begins them
            turns = deque(self.episode(self.random))
            self.next(_Played(iteration, self.begun % loop.replicas, self.now, turns))
            self.begun, self.busy = self.begun + 1, self.busy + 1

    def next(self, one: _Played) -> None:
        """Ask for the next answer of an episode, or end it."""
        if not one.left:
            self.end(one)
        elif self.loop.at_once is None or self.answering[one.replica] < self.loop.at_once:
            self.answering[one.replica] += 1
            self.after(one.left[0][0], lambda: self.answered(one))
        else:
            self.queues[one.replica].append(one)

    def answered(self, one: _Played) -> None:
        """Step the environment, and have the replica begin with another answer."""
        self.answering[one.replica] -= 1
        self.after(one.left.popleft()[1], lambda: self.next(one))
        if self.queues[one.replica]:
            self.next(self.queues[one.replica].popleft())

    def end(self, one: _Played) -> None:
        """Free a slot; the last episode of an iteration has the iteration trained."""
        self.busy, self.played = self.busy - 1, self.played + self.now - one.began
        self.open[one.iteration] -= 1
        while len(self.trained) <= self.loop.iterations and not self.open[len(self.trained) - 1]:
            begins = max(self.now, self.trained[-1])
            self.waited += begins - self.trained[-1]
            self.trained.append(begins + self.loop.train + self.loop.score)
            self.after(self.trained[-1] - self.now, self.begin)
        self.begin()
