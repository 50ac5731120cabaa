"""Estimate how many continuations an interval of a wanted width needs, before any continuation is played."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil, fsum

import numpy as np

from perturn.credit.returns import recorded_rewards
from perturn.measure.advantages import (
    FEWEST,
    Floats,
    bounds_of,
    difference,
    returns_of,
    typical_variance,
    value_interval,
)
from perturn.measure.points import Continuation, Plan
from perturn.measure.worlds import WorldCheck
from perturn.types import Trajectory

PILOT = 50
"""Smallest number of continuations whose own returns are used."""
_DRAWS = 100
"""Number of simulated advantages."""
_MOST = 1024
"""Number of continuations from which widths are extrapolated."""


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
    width: float | None
    """Expected half-width of the 95 % interval of an advantage with this number of continuations, in units of
    reward. None if the returns of each point or task are equal."""
    wanted: float
    """Wanted half-width, in units of reward."""
    needed: int | None
    """Number of continuations of each point for the wanted half-width. None if there is no `width`."""
    played: int
    """Number of continuations that exist already."""
    to_play: int
    turns_to_play: int
    """Expected number of turns in the continuations to play, by the lengths of the recorded episodes."""
    from_pilot: bool
    """Whether the returns are of continuations. Returns of whole episodes have a larger variance on average."""


def forecast(
    world: WorldCheck,
    plan: Plan,
    explored: Sequence[Trajectory],
    done: Sequence[Continuation],
    continuations: int,
    wanted: float,
) -> Forecast:
    """Return the amount of work of a measurement, and the number of continuations that an interval needs.

    The forecast resamples recorded returns, and computes the intervals as `measure` does. Once 50 continuations exist,
    it uses the returns of each point. Before, it uses the returns of the episodes of each task. Their variance is at
    least as large on average, by the law of total variance.

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
    found = returns_of(own)
    pilot = [found[point] for point in sorted(found)]
    from_pilot = sum(map(len, pilot)) >= PILOT
    groups = pilot if from_pilot else _by_task(sorted(explored, key=lambda one: one.key))
    varies = any(np.ptp(returns) > 0 for returns in groups)
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
        width=expected_width(groups, continuations) if varies else None,
        wanted=wanted,
        needed=_needed(groups, wanted) if varies else None,
        played=len(own),
        to_play=sum(left.values()),
        turns_to_play=turns,
        from_pilot=from_pilot,
    )


def expected_width(groups: Collection[Floats], continuations: int) -> float:
    """Return the mean half-width of intervals of simulated advantages.

    Each advantage has two samples from the returns of one group and one return of any group. Without the added
    return, a group of few equal returns would have no variance.

    Args:
        groups: Returns of points or tasks, in units of reward [returns].
        continuations: Number of continuations from each point.
    """
    bounds, typical, random = bounds_of(groups), typical_variance(groups), np.random.default_rng(0)
    listed, pooled = list(groups), np.concatenate(list(groups))
    found = []
    for each in random.integers(len(listed), size=_DRAWS):
        own = np.append(listed[each], random.choice(pooled))
        one, other = (
            value_interval(tuple(sorted(drawn)), bounds, typical)
            for drawn in random.choice(own, (2, continuations)).tolist()
        )
        low, high = difference(one, other)
        found.append((high - low) / 2)
    return float(np.mean(found))


def _needed(groups: Collection[Floats], wanted: float) -> int:
    """Return the number of continuations for which an interval has the wanted half-width.

    Above `_MOST` continuations, the half-width falls with the square root of their number.
    """
    found = bisect_left(range(_MOST), -wanted, lo=FEWEST, key=lambda many: -expected_width(groups, many))
    return found if found < _MOST else ceil(_MOST * (expected_width(groups, _MOST) / wanted) ** 2)


def _by_task(explored: Sequence[Trajectory]) -> list[Floats]:
    """Return the returns of the episodes of each task; of all episodes as one group if each task has only one."""
    found: dict[str, list[float]] = {}
    for one in explored:
        found.setdefault(one.task.id, []).append(fsum(recorded_rewards(one)))
    groups = [np.array(returns) for returns in found.values()]
    return groups if any(len(returns) > 1 for returns in groups) else [np.concatenate(groups)]
