"""A simulation of the online loop: how long its iterations take where exploration and training overlap."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from statistics import fmean

Draw = Callable[[Random], float]
"""Draws a number, in seconds unless it says otherwise."""


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


@dataclass(frozen=True)
class Timeline:
    """Moments of a simulated run, in seconds from its beginning."""

    seconds: float
    """End of the last iteration."""
    waiting: float
    """Share of the time in which the trainer waits for episodes."""
    idle: float
    """Share of the slots' time in which no episode is played."""


def episode_seconds(turns: Draw, answer: Draw, step: Draw, start: float = 0.0) -> Draw:
    """Return a draw of the seconds of an episode.

    Args:
        turns: Draws the number of turns.
        answer: Draws the seconds in which the engine answers, beside the other episodes.
        step: Draws the seconds of a step of the environment.
        start: Seconds in which an episode begins.
    """
    return lambda random: start + sum(answer(random) + step(random) for _ in range(round(turns(random))))


def simulate(loop: Loop, episode: Draw, seed: int = 0) -> Timeline:
    """Simulate a run, of which each episode takes as long as `episode` draws.

    The episodes of an iteration begin in order, each in the first free slot. They begin once all episodes of the
    previous iteration have begun, and once the policy `staleness` versions before theirs is trained.
    """
    random, free, trained = Random(seed), [0.0] * loop.slots, [0.0]
    handed_out = played = waited = 0.0
    for iteration in range(1, loop.iterations + 1):
        gate = max(handed_out, trained[max(0, iteration - 1 - loop.staleness)])
        over = 0.0
        for _ in range(loop.episodes):
            handed_out = max(gate, heapq.heappop(free))
            seconds = episode(random)
            heapq.heappush(free, handed_out + seconds)
            over, played = max(over, handed_out + seconds), played + seconds
        begins = max(over, trained[-1])
        waited += begins - trained[-1]
        trained.append(begins + loop.train + loop.score)
    return Timeline(trained[-1], waited / trained[-1], 1 - played / (loop.slots * trained[-1]))


def expected_seconds(loop: Loop, episode: Draw, runs: int = 20) -> float:
    """Return the mean seconds of some simulated runs."""
    return fmean(simulate(loop, episode, seed).seconds for seed in range(runs))
