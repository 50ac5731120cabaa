"""Continuations that an interval of a wanted width needs, before any is played."""

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
"""Continuations that must be there for their variance to be read."""


@dataclass(frozen=True)
class Forecast:
    """Work of a measurement."""

    world: WorldCheck
    episodes: int
    turns: int
    points: int
    """Places that continuations are played from."""
    continuations: int
    """From each point, as asked for."""
    width: float
    """Expected half-width of the 95 % interval of an advantage with this number of continuations, in units of
    reward."""
    wanted: float
    """Half-width that was wanted, in units of reward."""
    needed: int
    """Continuations of a point for the wanted half-width."""
    played: int
    """Continuations that exist already."""
    to_play: int
    turns_to_play: int
    """Turns of these, as far as the recorded episodes tell."""
    from_pilot: bool
    """Whether the variance is of continuations. The variance of whole episodes of a task is larger on average."""


def forecast(
    world: WorldCheck,
    plan: Plan,
    explored: Sequence[Trajectory],
    done: Sequence[Continuation],
    continuations: int,
    wanted: float,
) -> Forecast:
    """Return the work of a measurement, and the continuations that an interval needs.

    The variance of returns at a point is the mean over points with continuations, once 50 are there. Before that it is
    the mean variance of the returns of the episodes of a task, which is at least as large on average (total variance).

    Args:
        world: How the world answers.
        plan: Episodes and points.
        explored: All episodes of the iteration.
        done: Continuations that were played.
        continuations: From each point.
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
    """Return the mean variance of the returns of the episodes of a task; without tasks of several, of all episodes."""
    by_task: dict[str, list[float]] = {}
    for one in explored:
        by_task.setdefault(one.task.id, []).append(fsum(recorded_rewards(one)))
    several = [returns for returns in by_task.values() if len(returns) > 1]
    groups = several or [[each for own in by_task.values() for each in own]]
    found = [float(np.var(returns, ddof=1)) for returns in groups if len(returns) > 1]
    return float(np.mean(found)) if found else 0.25
