"""Advantages of recorded turns from the returns of continuations, with intervals and split halves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from perturn.credit.returns import recorded_rewards
from perturn.measure.points import Continuation, Plan, Point
from perturn.stats import Bounds, Estimate, mean_interval
from perturn.types import succeeded

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]

SPLITS = 10
"""Random splits of the continuations of each point into two halves."""
FEWEST = 4
"""Continuations of a point, two a half, below which a turn is left out."""


@dataclass(frozen=True)
class Measured:
    """Turns whose advantage was measured, one entry each [turns]."""

    task: Ids
    """Number of the task, from 0."""
    episode: Ids
    """Number of the episode among the planned episodes, from 0."""
    position: Ids
    """Place in its episode, from 0."""
    length: Ids
    """Turns of its episode."""
    solved: Flags
    """Whether its episode solved the task."""
    advantage: Floats
    """From all continuations, in units of reward."""
    low: Floats
    """Lower end of its 95 % interval."""
    high: Floats
    """Upper end of its 95 % interval."""
    halves: Floats
    """Advantages from each half of the continuations [2, splits, turns]."""
    value: Floats
    """Value of the state before each turn, in units of reward."""

    def where(self, keep: Flags) -> Measured:
        """Return some of the turns."""
        columns = {name: column[..., keep] for name, column in vars(self).items()}
        return Measured(**columns)

    @property
    def third(self) -> Ids:
        """Third of its episode that each turn lies in: 0, 1 or 2."""
        return 3 * self.position // self.length


def returns_of(continuations: Sequence[Continuation]) -> dict[Point, Floats]:
    """Return the returns of the continuations that count, by point and in the order of their numbers.

    A continuation that FAILED, or whose world did not come back to the point, gives no information on the point.
    """
    found: dict[Point, list[tuple[int, float]]] = {}
    for one in continuations:
        if one.outcome == "counted":
            found.setdefault(one.point, []).append((one.number, one.reward))
    return {point: np.array([reward for _, reward in sorted(own)]) for point, own in found.items()}


@dataclass(frozen=True)
class _Value:
    """A value that continuations were played for, or that is known."""

    estimate: Estimate
    halves: Floats
    """Means of the two halves [2, splits]."""


_ENDED = _Value(Estimate(0.0, 0.0, 0.0, 1), np.zeros((2, SPLITS)))
"""An episode that has ended is worth nothing more."""


def measure(plan: Plan, returns: Mapping[Point, Floats], seed: int = 0) -> Measured:
    r"""Return the advantage of each turn whose points have continuations enough.

        V_t = mean_k G_t^k              G: rewards from turn t on, of continuations before turn t
        A_t = r_t + V_(t+1) - V_t       V = 0 after the end
        A_t = Q_t - V_t                 in an open world; Q_t: of continuations that repeat the action of turn t

    The variance of A_t is s_t^2 / K + s_(t+1)^2 / K, with s the standard deviation of the returns at a point. Errors of
    neighbouring turns share a value, and are correlated. The recorded episode does not count as a continuation of its
    own turns: it took the action that is measured.

    Each value has a score interval between the lowest and the highest return of all (`mean_interval`). The interval of
    a difference of values a - b is then: [d - sqrt((a - l_a)^2 + (u_b - b)^2), d + sqrt((u_a - a)^2 + (b - l_b)^2)].

    Source: VinePPO, Kazemnejad et al. 2024, arXiv:2410.01679, for values by continuations; Zou and Donner 2008,
    "Construction of confidence limits about effect measures", for the interval, which for rates is method 10 of
    Newcombe 1998, "Interval estimation for the difference between independent proportions".
    Differs: nothing.

    Args:
        plan: Episodes and their points.
        returns: Returns of the continuations of each point.
        seed: Of the splits.
    """
    values = _values(plan, returns, seed)
    rows, halves = [], []
    tasks: dict[str, int] = {}
    for number, one in enumerate(plan.episodes):
        task = tasks.setdefault(one.task.id, len(tasks))
        rewards = recorded_rewards(one)
        points = zip(plan.before[number], plan.after[number], strict=True)
        for turn, (start, end) in enumerate(points):
            before = values.get(start)
            after = _ENDED if end is None else values.get(end)
            if before is None or after is None:
                continue
            gained = 0.0 if end is not None and end.acted else rewards[turn]
            found = gained + after.estimate.mean - before.estimate.mean
            low, high = _difference(after.estimate, before.estimate)
            known = (task, number, turn, len(one.turns), succeeded(one))
            rows.append((*known, found, gained + low, gained + high, before.estimate.mean))
            halves.append(gained + after.halves - before.halves)
    return _stacked(rows, halves)


def _stacked(rows: Sequence[tuple[float, ...]], halves: Sequence[Floats]) -> Measured:
    table = np.array(rows, dtype=np.float64).reshape(len(rows), 9).T
    task, episode, position, length = (column.astype(np.int64) for column in table[:4])
    split = np.stack(halves, axis=-1) if halves else np.zeros((2, SPLITS, 0))
    advantage, low, high, value = table[5:]
    return Measured(task, episode, position, length, table[4] > 0, advantage, low, high, split, value)


def _values(plan: Plan, returns: Mapping[Point, Floats], seed: int) -> dict[Point, _Value]:
    """Return the value of each point with continuations enough."""
    bounds = bounds_of(returns)
    found = {}
    for number, point in enumerate(plan.points):
        own = returns.get(point)
        if own is None or len(own) < FEWEST:
            continue
        random = np.random.default_rng((seed, number))
        dealt = random.permuted(np.tile(own, (SPLITS, 1)), axis=1)
        middle = len(own) // 2
        halves = np.stack([dealt[:, :middle].mean(1), dealt[:, middle:].mean(1)])
        found[point] = _Value(_interval(tuple(sorted(own.tolist())), bounds), halves)
    return found


@cache
def _interval(returns: tuple[float, ...], bounds: Bounds) -> Estimate:
    """Return the mean and interval of the returns of a point; many points have the same ones."""
    return mean_interval(returns, bounds=bounds)


def bounds_of(returns: Mapping[Point, Floats]) -> Bounds:
    """Return the lowest and the highest return that was seen, 0 included; at least one apart from the other."""
    low = min((float(own.min()) for own in returns.values()), default=0.0)
    high = max((float(own.max()) for own in returns.values()), default=0.0)
    low, high = min(0.0, low), max(0.0, high)
    return (low, high) if high > low else (0.0, 1.0)


def _difference(one: Estimate, other: Estimate) -> tuple[float, float]:
    """Return the interval of the difference of two independent means; see `measure`."""
    found = one.mean - other.mean
    below = sqrt((one.mean - one.low) ** 2 + (other.high - other.mean) ** 2)
    above = sqrt((one.high - one.mean) ** 2 + (other.mean - other.low) ** 2)
    return found - below, found + above


def spread_within(returns: Mapping[Point, Floats]) -> float | None:
    """Return the mean variance of the returns of a point, in squared units of reward; None: no point has two."""
    found = [float(own.var(ddof=1)) for own in returns.values() if len(own) > 1]
    return float(np.mean(found)) if found else None


def needed(variance: float, width: float, quantile: float = 1.96) -> int:
    """Return the continuations of a point with which the interval of an advantage has a half-width.

        K = 2 (z / h)^2 s^2

    Args:
        variance: s^2, of the returns of a point, in squared units of reward.
        width: h, in units of reward.
        quantile: z.
    """
    return max(FEWEST, int(np.ceil(2 * (quantile / width) ** 2 * variance)))
