"""Simulation of the online loop, to predict its time if exploration and training overlap.

The events are the ends of answers, of environment steps, and of trainings.
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
"""Function that draws a random number, usually in seconds."""
Turns = Sequence[tuple[float, float]]
"""For each turn of an episode, the seconds of the answer and the seconds of the environment step after it."""
Play = Callable[[Random], Turns]
"""Function that draws the turns of a random episode."""


@dataclass(frozen=True)
class Loop:
    """Parameters of a simulated online run."""

    iterations: int
    episodes: int
    """Number of episodes per iteration."""
    slots: int
    """Number of episodes at the same time."""
    train: float
    """Seconds from an iteration's last episode to its new policy: credit, training, and transfer of the weights."""
    staleness: int = 0
    score: float = 0.0
    """Seconds of the evaluation after a training; a new policy is available only after it."""
    replicas: int = 1
    """Number of copies of the policy; a conversation stays with one copy."""
    at_once: int | None = None
    """Largest number of answers that a replica samples at the same time; None: no limit."""


@dataclass(frozen=True)
class Timeline:
    """Result of a simulation."""

    seconds: float
    """Seconds from the start to the end of the last iteration."""
    waiting: float
    """Share of this time in which the trainer waits for episodes."""
    idle: float
    """Share of the slots' total time in which a slot is free."""


def episode_turns(turns: Draw, answer: Draw, step: Draw, start: float = 0.0) -> Play:
    """Return a function that draws the turns of a random episode.

    Args:
        turns: Draws the number of turns.
        answer: Draws the seconds of an answer, without waiting for a replica.
        step: Draws the seconds of an environment step.
        start: Seconds for the start of an episode.
    """
    return lambda random: (
        (0.0, start),
        *((answer(random), step(random)) for _ in range(round(turns(random)))),
    )


def simulate(loop: Loop, episode: Play, seed: int = 0) -> Timeline:
    """Simulate a run.

    Episodes start in order, each in the first free slot. The episodes of iteration i, counted from 1, start once two
    conditions hold: all episodes of iteration i - 1 have started, and policy i - 1 - `staleness` has been trained.

    Args:
        loop: Parameters of the run.
        episode: Function that draws the turns of an episode.
        seed: Seed of the random numbers.
    """
    return _Run(loop, episode, Random(seed)).timeline()


def expected_seconds(loop: Loop, episode: Play) -> float:
    """Return the mean seconds of 20 simulated runs."""
    return fmean(simulate(loop, episode, seed).seconds for seed in range(20))


@dataclass
class _Played:
    """An episode that is running."""

    iteration: int
    replica: int
    began: float
    left: deque[tuple[float, float]]


@dataclass
class _Run:
    """State of a simulated run, which advances from event to event."""

    loop: Loop
    episode: Play
    random: Random
    now: float = 0.0
    begun: int = 0
    busy: int = 0
    """Number of slots with a running episode."""
    played: float = 0.0
    waited: float = 0.0
    trained: list[float] = field(default_factory=lambda: [0.0])
    """Time at which each policy becomes available, in seconds; the first policy is available at 0."""

    def __post_init__(self) -> None:
        """Create empty queues and counters."""
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.number = count()
        self.open = [self.loop.episodes] * self.loop.iterations
        self.answering = [0] * self.loop.replicas
        self.queues: list[deque[_Played]] = [deque() for _ in range(self.loop.replicas)]

    def timeline(self) -> Timeline:
        """Process all events, and return the result."""
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
        """Start episodes as long as slots are free and the policy of their iteration is available."""
        loop = self.loop
        while self.busy < loop.slots and self.begun < loop.iterations * loop.episodes:
            iteration = self.begun // loop.episodes
            needed = max(0, iteration - loop.staleness)
            if needed >= len(self.trained) or self.trained[needed] > self.now:
                return  # the end of a training calls this again
            turns = deque(self.episode(self.random))
            self.next(_Played(iteration, self.begun % loop.replicas, self.now, turns))
            self.begun, self.busy = self.begun + 1, self.busy + 1

    def next(self, one: _Played) -> None:
        """Request the next answer of an episode, or end the episode if no turn is left."""
        if not one.left:
            self.end(one)
        elif self.loop.at_once is None or self.answering[one.replica] < self.loop.at_once:
            self.answering[one.replica] += 1
            self.after(one.left[0][0], lambda: self.answered(one))
        else:
            self.queues[one.replica].append(one)

    def answered(self, one: _Played) -> None:
        """Start the environment step after an answer, and let the replica start the next waiting answer."""
        self.answering[one.replica] -= 1
        self.after(one.left.popleft()[1], lambda: self.next(one))
        if self.queues[one.replica]:
            self.next(self.queues[one.replica].popleft())

    def end(self, one: _Played) -> None:
        """Free the slot of an episode; after the last episode of an iteration, start the iteration's training."""
        self.busy, self.played = self.busy - 1, self.played + self.now - one.began
        self.open[one.iteration] -= 1
        while len(self.trained) <= self.loop.iterations and not self.open[len(self.trained) - 1]:
            begins = max(self.now, self.trained[-1])
            self.waited += begins - self.trained[-1]
            self.trained.append(begins + self.loop.train + self.loop.score)
            self.after(self.trained[-1] - self.now, self.begin)
        self.begin()
