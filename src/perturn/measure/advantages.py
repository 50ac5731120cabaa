"""Compute advantages of recorded turns from the returns of continuations, with intervals and split halves."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from perturn.credit.returns import recorded_rewards
from perturn.measure.points import Continuation, Plan, Point
from perturn.stats import Bounds, Estimate, mean_interval
from perturn.stats.intervals import at_bounds, interval_with_spread
from perturn.types import succeeded

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]

SPLITS = 10
"""Number of random splits of each point's continuations into two halves."""
_CONFIDENCE = 0.95
"""Confidence of the intervals of values."""
FEWEST = 4
"""Fewest continuations of a point, two in each half. A turn whose points have fewer is left out."""


@dataclass(frozen=True)
class Measured:
    """Turns with a measured advantage; each array has one entry for a turn [turns]."""

    task: Ids
    """Number of the turn's task, from 0."""
    episode: Ids
    """Number of the turn's episode among the planned episodes, from 0."""
    position: Ids
    """Position of the turn in its episode, from 0."""
    length: Ids
    """Number of turns in the episode."""
    solved: Flags
    """Whether the episode solved its task."""
    advantage: Floats
    """Advantage from all continuations, in units of reward."""
    low: Floats
    """Lower end of the 95 % interval of the advantage."""
    high: Floats
    """Upper end of the 95 % interval of the advantage."""
    halves: Floats
    """Advantages from each half of the continuations, in units of reward [2, splits, turns]."""
    value: Floats
    """Value of the state before the turn, in units of reward."""

    def where(self, keep: Flags) -> Measured:
        """Return the turns that a mask [turns] keeps."""
        columns = {name: column[..., keep] for name, column in vars(self).items()}
        return Measured(**columns)

    @property
    def third(self) -> Ids:
        """Third of the episode in which each turn lies: 0, 1 or 2 [turns]."""
        return 3 * self.position // self.length


def returns_of(continuations: Sequence[Continuation]) -> dict[Point, Floats]:
    """Return the returns of the counted continuations by point, in the order of the continuations' numbers.

    A continuation is not counted if it FAILED, or if the environment did not return to the state of the point.
    """
    found: dict[Point, list[tuple[int, float]]] = {}
    for one in continuations:
        if one.outcome == "counted":
            found.setdefault(one.point, []).append((one.number, one.reward))
    return {point: np.array([reward for _, reward in sorted(own)]) for point, own in found.items()}


@dataclass(frozen=True)
class _Value:
    """Value of a point, estimated from its continuations or known exactly."""

    estimate: Estimate
    halves: Floats
    """Mean returns of the two halves, in units of reward [2, splits]."""


_ENDED = _Value(Estimate(0.0, 0.0, 0.0, 1), np.zeros((2, SPLITS)))
"""Value of an episode that has ended: zero, known exactly."""


def measure(plan: Plan, returns: Mapping[Point, Floats], seed: int = 0) -> Measured:
    r"""Return the advantage of each turn whose points have enough continuations.

        V_t = mean_k G_t^k              G: rewards from turn t on, of continuations before turn t
        A_t = r_t + V_(t+1) - V_t       V = 0 after the end
        A_t = Q_t - V_t                 in an open environment; Q_t: of continuations that repeat the action of turn t

    The variance of A_t is s_t^2 / K + s_(t+1)^2 / K, with s the standard deviation of the returns at a point. The
    errors of neighbouring turns are correlated, since both use the value between them. The recorded episode is not a
    continuation of its own turns, because it took the measured action.

    Each value has the interval of `value_interval`, with the lowest and the highest return of all points as bounds.
    The interval of a difference of values d = a - b is then:

        [d - sqrt((a - l_a)^2 + (u_b - b)^2), d + sqrt((u_a - a)^2 + (b - l_b)^2)]

    Source: VinePPO, Kazemnejad et al. 2024, arXiv:2410.01679, for values by continuations; Zou and Donner 2008,
    "Construction of confidence limits about effect measures", for the interval, which for rates is method 10 of
    Newcombe 1998, "Interval estimation for the difference between independent proportions".
    Differs: nothing.

    Args:
        plan: Recorded episodes and their points.
        returns: Returns of the continuations of each point, in units of reward [continuations].
        seed: Seed of the random splits.
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
            low, high = difference(after.estimate, before.estimate)
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
    """Return the value of each point that has at least `FEWEST` continuations."""
    bounds, typical = bounds_of(returns.values()), typical_variance(returns.values())
    found = {}
    for number, point in enumerate(plan.points):
        own = returns.get(point)
        if own is None or len(own) < FEWEST:
            continue
        random = np.random.default_rng((seed, number))
        dealt = random.permuted(np.tile(own, (SPLITS, 1)), axis=1)
        middle = len(own) // 2
        halves = np.stack([dealt[:, :middle].mean(1), dealt[:, middle:].mean(1)])
        found[point] = _Value(value_interval(tuple(sorted(own.tolist())), bounds, typical), halves)
    return found


@cache
def value_interval(returns: tuple[float, ...], bounds: Bounds, typical: float) -> Estimate:
    r"""Return the mean of a point's returns with its 95 % interval, cached because many points have equal returns.

        s~^2 = s^2 + max(0, s0^2 - s^2) / 3

    s^2 is the variance of the returns, and s0^2 the typical variance. A few similar returns may all lack a rare return,
    such as a success, and then s^2 alone is far too small. If all returns lie at the bounds, as for rewards of 0 and 1,
    the interval is the score interval of a rate. Otherwise it is the score interval of `mean_interval`, with s~ as the
    standard deviation, and never narrower than `mean_interval` itself, which is wide for equal returns.

    Source: a variance that is moderated by the variances of other units, as in Smyth 2004, "Linear models and empirical
    Bayes methods for assessing differential expression".
    Differs: the weight 1/3 is fixed, s^2 is never reduced, and the degrees of freedom are not increased.
    `benchmarks/value_intervals.py` has the coverage.

    Args:
        returns: Returns of the continuations, in units of reward.
        bounds: Lowest and highest return of all points.
        typical: Typical variance of the returns of a point; see `typical_variance`.
    """
    sample = np.array(returns)
    found = mean_interval(returns, bounds=bounds)
    if len(sample) < 2 or not typical or at_bounds(sample, bounds):
        return found
    own = float(sample.var(ddof=1))
    error = sqrt((own + max(0.0, typical - own) / 3) / len(sample))
    low, high = interval_with_spread(found.mean, error, len(sample) - 1, _CONFIDENCE, bounds)
    return replace(found, low=min(low, found.low), high=max(high, found.high))


def typical_variance(returns: Collection[Floats]) -> float:
    """Return the mean variance of the points whose returns vary; 0 if none vary."""
    found = [float(own.var(ddof=1)) for own in returns if len(own) > 1 and np.ptp(own) > 0]
    return float(np.mean(found)) if found else 0.0


def bounds_of(returns: Collection[Floats]) -> Bounds:
    """Return the lowest and the highest return, extended to include 0; (0, 1) if all returns are 0."""
    low = min((float(own.min()) for own in returns), default=0.0)
    high = max((float(own.max()) for own in returns), default=0.0)
    low, high = min(0.0, low), max(0.0, high)
    return (low, high) if high > low else (0.0, 1.0)


def difference(one: Estimate, other: Estimate) -> tuple[float, float]:
    """Return the interval of the difference of two independent means; see `measure`."""
    found = one.mean - other.mean
    below = sqrt((one.mean - one.low) ** 2 + (other.high - other.mean) ** 2)
    above = sqrt((one.high - one.mean) ** 2 + (other.mean - other.low) ** 2)
    return found - below, found + above
