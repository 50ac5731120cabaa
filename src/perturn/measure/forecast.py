"""Estimate how many continuations an interval of a wanted width needs, before any continuation is played."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np

from perturn.credit.returns import recorded_rewards
from perturn.measure.advantages import needed, returns_of, spread_within
from perturn.measure.points import Continuation, Plan
from perturn.measure.worlds import WorldCheck
from perturn.types import Trajectory

PILOT = 50
"""Smallest number of continuations whose own variance is used."""


@dataclass(frozen=True)
class Forecast:
    """Amount of work of a measurement."""

    world: WorldCheck
    episodes: int
    turns: int
    points: int
    """Number of points from which continuations are played."""
    continuations: int
    """Requested number of continuations from each point."""
    width: float
    """Expected half-width of the 95 % interval of an advantage with this number of continuations, in units of
    reward."""
    wanted: float
    """Wanted half-width, in units of reward."""
    needed: int
    """Number of continuations of each point for the wanted half-width."""
    played: int
    """Number of continuations that exist already."""
    to_play: int
    turns_to_play: int
    """Expected number of turns in the continuations to play, by the lengths of the recorded episodes."""
    from_pilot: bool
    """Whether the variance comes from continuations. The variance of whole episodes is larger on average."""


def forecast(
    world: WorldCheck,
    plan: Plan,
    explored: Sequence[Trajectory],
    done: Sequence[Continuation],
    continuations: int,
    wanted: float,
) -> Forecast:
    """Return the amount of work of a measurement, and the number of continuations that an interval needs.

    Once 50 continuations exist, the variance of a point's returns is averaged over the points that have continuations.
    Before, the variance of the returns between episodes of a task is used. It is at least as large on average, by the
    law of total variance.

    Args:
        world: Result of checking the environment.
        plan: Recorded episodes and their points.
        explored: All episodes of the iteration.
        done: Continuations that are already played.
        continuations: Number of continuations from each point.
        wanted: Half-width of the 95 % interval of an advantage, in units of reward.
    """
    points = set(plan.points)
    own = [one for one in done if one.point in points and one.number < continuations]
    pilot = spread_within(returns_of(own)) if len(own) >= PILOT else None
    variance = _between_episodes(explored) if pilot is None else pilot
    left = dict.fromkeys(points, continuations)
    for one in own:
        left[one.point] -= 1
    lengths = {one.key: len(one.turns) for one in plan.episodes}
    turns = sum(many * (lengths[point.task, point.sample] - point.turn) for point, many in left.items())
    return Forecast(
        world=world,
        episodes=len(plan.episodes),
        turns=sum(lengths.values()),
        points=len(points),
        continuations=continuations,
        width=1.96 * float(np.sqrt(2 * variance / continuations)),
        wanted=wanted,
        needed=needed(variance, wanted),
        played=len(own),
        to_play=sum(left.values()),
        turns_to_play=turns,
        from_pilot=pilot is not None,
    )


def _between_episodes(explored: Sequence[Trajectory]) -> float:
    """Return the mean variance of returns between episodes of a task; over all episodes if each task has only one."""
    by_task: dict[str, list[float]] = {}
    for one in explored:
        by_task.setdefault(one.task.id, []).append(fsum(recorded_rewards(one)))
    several = [returns for returns in by_task.values() if len(returns) > 1]
    groups = several or [[each for own in by_task.values() for each in own]]
    found = [float(np.var(returns, ddof=1)) for returns in groups if len(returns) > 1]
    return float(np.mean(found)) if found else 0.25
