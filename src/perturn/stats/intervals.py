"""Means and rates with their intervals. Values of one cluster may be correlated."""

from __future__ import annotations

import importlib
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


class _Module:
    """A module of scipy that is imported at its first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


stats: Any = _Module("scipy.stats")
"""`scipy.stats`."""
optimize: Any = _Module("scipy.optimize")
"""`scipy.optimize`."""


Floats = NDArray[np.float64]
Bounds = tuple[float, float] | None
"""Lowest and highest possible value; None if values are unbounded."""


@dataclass(frozen=True)
class Estimate:
    """A mean or a rate with its interval."""

    mean: float
    low: float
    """Lower end of the interval; -inf if the data do not determine it."""
    high: float
    """Upper end of the interval; inf if the data do not determine it."""
    n: int
    """Number of independent units: values, trials or clusters."""


def mean_interval(
    values: Sequence[float], confidence: float = 0.95, *, bounds: Bounds = (0.0, 1.0)
) -> Estimate:
    """Return the mean of independent values, with an interval for the expected value.

    The kind of interval depends on the values:

    - If all values lie at the bounds: the score interval of a rate. See `rate_interval`.
    - For other values between bounds: the score interval of a rate whose number of trials gives the same standard
      error, with Student's t instead of the normal quantile. Like the interval of a rate, it extends further away from
      the nearer bound.
      Source: Korn and Graubard 1998, "Confidence intervals for proportions with small expected number of positive
      counts", with Wilson's interval as in Franco, Little, Louis and Slud 2019, "Comparative study of confidence
      intervals for proportions in complex sample surveys". Differs: for any mean, and not only for rates.
    - Without bounds: Student's t. Source: Student 1908, "The probable error of a mean".
    - For one value, or equal values inside the bounds: the data have no spread, yet the mean is not known exactly. See
      `interval_without_spread`. Source: Clopper and Pearson 1934; Hanley and Lippman-Hand 1983.

    If few values are nearly all equal, each of these intervals can be too narrow. `docs/methods/intervals.md` has the
    measured coverage.

    Args:
        values: Independent values, such as the scores of the tasks of a list.
        confidence: Probability with which the interval should contain the expected value, in (0, 1).
        bounds: Lowest and highest possible value; None if values are unbounded.

    Returns:
        The mean and its interval, with n the number of values.

    Raises:
        ValueError: If there is no value, or if a value is not finite or lies outside the bounds.
    """
    sample = checked(values, "values", bounds)
    check_confidence(confidence)
    mean = float(sample.mean())
    if bounds is not None and at_bounds(sample, bounds):
        rate = rate_interval(int((sample == bounds[1]).sum()), len(sample), confidence)
        low, high = (bounds[0] + end * (bounds[1] - bounds[0]) for end in (rate.low, rate.high))
    elif np.ptp(sample) <= rounding(float(np.abs(sample).max()), bounds):
        low, high = interval_without_spread(mean, len(sample), confidence, bounds)
    else:
        error = float(sample.std(ddof=1)) / math.sqrt(len(sample))
        low, high = interval_with_spread(mean, error, len(sample) - 1, confidence, bounds)
    return Estimate(mean, min(low, mean), max(high, mean), len(sample))


def rate_interval(successes: int, n: int, confidence: float = 0.95) -> Estimate:
    """Return the rate of successes with its score interval.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    Differs: nothing. There is no continuity correction.

    Args:
        successes: Number of trials that succeeded.
        n: Number of independent trials.
        confidence: As in `mean_interval`.

    Returns:
        The rate and its interval, with n the number of trials.

    Raises:
        ValueError: If there is no trial, or if `successes` is below 0 or above n.
    """
    if n < 1:
        raise ValueError(f"a rate needs at least one trial, got n = {n}.")
    if not 0 <= successes <= n:
        raise ValueError(f"successes must be between 0 and n = {n}, got {successes}.")
    check_confidence(confidence)
    rate = successes / n
    low, high = map(float, stats.binomtest(successes, n).proportion_ci(confidence, "wilson"))
    return Estimate(rate, max(0.0, min(low, rate)), min(1.0, max(high, rate)), n)


def cluster_interval(
    values: Sequence[float],
    clusters: Sequence[Hashable],
    confidence: float = 0.95,
    *,
    bounds: Bounds = (0.0, 1.0),
) -> Estimate:
    """Return the mean over all values, with an interval that is valid if values of a cluster are correlated.

    Turns of one trajectory are correlated, while trajectories are independent. Let m be the mean of all N values and
    e_g the sum of (value - m) in cluster g of G. The standard error is sqrt(G/(G-1) sum_g e_g^2) / N, and
    `mean_interval` makes the interval from this error, with t(G-1). A single cluster, or clusters without spread
    between them, count as equal values, one for each cluster (see `mean_interval`).

    Source: Liang and Zeger 1986, "Longitudinal data analysis using generalized linear models"; the G/(G-1) and t(G-1)
    are CR1 of Cameron and Miller 2015, "A practitioner's guide to cluster-robust inference", Section II. Differs:
    nothing without bounds. With bounds, see `mean_interval`.

    Args:
        values: One value for each unit, such as a turn.
        clusters: The cluster of each value, such as its trajectory.
        confidence: As in `mean_interval`.
        bounds: Lowest and highest possible value; None if values are unbounded.

    Returns:
        The mean and its interval, with n the number of clusters.

    Raises:
        ValueError: If there is no value, if a value is not finite or lies outside the bounds, or if the lists differ in
            length.
    """
    if len(values) != len(clusters):
        raise ValueError(f"expected one cluster a value, got {len(clusters)} for {len(values)} values.")
    sample = checked(values, "values", bounds)
    check_confidence(confidence)
    mean = float(sample.mean())
    index = {cluster: position for position, cluster in enumerate(dict.fromkeys(clusters))}
    residuals = np.zeros(len(index))
    np.add.at(residuals, [index[cluster] for cluster in clusters], sample - mean)
    count = len(index)
    if count == 1 or float(np.abs(residuals).max()) <= rounding(float(np.abs(sample).sum()), bounds):
        low, high = interval_without_spread(mean, count, confidence, bounds)
    else:
        error = math.sqrt(count / (count - 1) * float((residuals**2).sum())) / len(sample)
        low, high = interval_with_spread(mean, error, count - 1, confidence, bounds)
    return Estimate(mean, min(low, mean), max(high, mean), count)


def pass_hat(outcomes: Sequence[tuple[int, int]], k: int, confidence: float = 0.95) -> Estimate:
    """Return pass^k: the probability that k episodes of a task all succeed, averaged over tasks, with its interval.

    For a task with c successes in n episodes, the estimate C(c, k) / C(n, k) is unbiased.

    Source: Yao et al. 2024, "tau-bench: A Benchmark for Tool-Agent-User Interaction in Real-World Domains",
    arXiv:2406.12045, Section 3.
    Differs: the interval over tasks is added.

    Args:
        outcomes: Number of episodes and number of successes of each task.
        k: Number of episodes that must all succeed. Each task must have at least k episodes.
        confidence: As in `mean_interval`.

    Raises:
        ValueError: If a task has fewer episodes than k.
    """
    _check_draws(outcomes, k)
    return mean_interval([math.comb(c, k) / math.comb(n, k) for n, c in outcomes], confidence)


def pass_at(outcomes: Sequence[tuple[int, int]], k: int, confidence: float = 0.95) -> Estimate:
    """Return pass@k: the probability that any of k episodes of a task succeeds, averaged over tasks, with its interval.

    For a task with c successes in n episodes, the estimate 1 - C(n - c, k) / C(n, k) is unbiased, while 1 - (1 - c/n)^k
    is too low.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, Eq. 1.
    Differs: the interval over tasks is added.

    Args:
        outcomes: Number of episodes and number of successes of each task.
        k: Number of episodes of which at least one must succeed. Each task must have at least k episodes.
        confidence: As in `mean_interval`.

    Raises:
        ValueError: If a task has fewer episodes than k.
    """
    _check_draws(outcomes, k)
    return mean_interval([1 - math.comb(n - c, k) / math.comb(n, k) for n, c in outcomes], confidence)


def _check_draws(outcomes: Sequence[tuple[int, int]], k: int) -> None:
    if k < 1 or any(n < k for n, _ in outcomes):
        raise ValueError(f"k must be from 1 to the fewest episodes of a task, got {k}.")


def checked(values: Sequence[float], name: str, bounds: Bounds) -> Floats:
    """Return values as an array. Reject an empty list, and values that are not finite or lie outside the bounds."""
    sample = np.asarray(values, dtype=np.float64)
    if sample.size == 0:
        raise ValueError(f"{name} must hold at least one number, got none.")
    if sample.ndim != 1:
        raise ValueError(f"{name} must be a flat list of numbers, got {sample.ndim} axes.")
    if not np.isfinite(sample).all():
        raise ValueError(f"{name} must be finite, got {sample[~np.isfinite(sample)][0]}.")
    if bounds is not None and not ((sample >= bounds[0]) & (sample <= bounds[1])).all():
        outside = sample[(sample < bounds[0]) | (sample > bounds[1])][0]
        raise ValueError(
            f"{name} must lie in {list(bounds)}, got {outside}. Pass their bounds, or bounds=None."
        )
    return sample


def check_confidence(confidence: float) -> None:
    """Reject a confidence that is not between 0 and 1."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}.")


def rounding(size: float, bounds: Bounds) -> float:
    """Return the largest difference that counts as zero, relative to the values and to the width of the bounds."""
    return 1e-12 * max(1e-300, size, 0.0 if bounds is None else bounds[1] - bounds[0])


def interval_without_spread(mean: float, n: int, confidence: float, bounds: Bounds) -> tuple[float, float]:
    """Return the interval from n equal values.

    Other values may have a probability of up to q = 1 - ((1 - confidence)/2)^(1/n) and still not appear in n draws.
    They may lie anywhere between the bounds. The interval is exact for 0/1 values (Clopper-Pearson). For one value it
    is valid by Markov's inequality. Without bounds the interval is infinite.
    """
    if bounds is None:
        return -math.inf, math.inf
    unseen = 1 - ((1 - confidence) / 2) ** (1 / n)
    return mean - unseen * (mean - bounds[0]), mean + unseen * (bounds[1] - mean)


def interval_with_spread(
    mean: float, error: float, freedom: float, confidence: float, bounds: Bounds
) -> tuple[float, float]:
    """Return the interval for a standard error and its degrees of freedom; see `mean_interval`."""
    quantile = float(stats.t.ppf(0.5 + confidence / 2, freedom))
    if bounds is None:
        return mean - quantile * error, mean + quantile * error
    low, width = bounds[0], bounds[1] - bounds[0]
    rate = (mean - low) / width
    ends = _score_interval(rate, rate * (1 - rate) * (width / error) ** 2, quantile)
    return low + width * max(0.0, ends[0]), low + width * min(1.0, ends[1])


def _score_interval(rate: float, trials: float, quantile: float) -> tuple[float, float]:
    """Return Wilson's interval for a number of trials that need not be whole, unlike scipy's function."""
    centre = (rate + quantile**2 / (2 * trials)) / (1 + quantile**2 / trials)
    spread = math.sqrt(rate * (1 - rate) / trials + quantile**2 / (4 * trials**2))
    half = quantile / (1 + quantile**2 / trials) * spread
    return centre - half, centre + half


def at_bounds(sample: Floats, bounds: Bounds) -> bool:
    """Return whether every value equals the lowest or the highest possible value."""
    return bounds is not None and bool(((sample == bounds[0]) | (sample == bounds[1])).all())
