"""Means and rates, each with its interval; values of one cluster may be correlated."""

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
"""Lowest and highest value possible; None: there are none."""


@dataclass(frozen=True)
class Estimate:
    """A mean or a rate, with the interval that goes with it."""

    mean: float
    low: float
    """Lower end of the interval; -inf if the data cannot give one."""
    high: float
    """Upper end of the interval; inf if the data cannot give one."""
    n: int
    """Independent units counted: values, trials, or clusters."""


def mean_interval(
    values: Sequence[float], confidence: float = 0.95, *, bounds: Bounds = (0.0, 1.0)
) -> Estimate:
    """Return the mean of independent values, with an interval for the expected value.

    - Values that are all the lowest or the highest possible: the score interval of a rate. See `rate_interval`.
    - Other scores between bounds: the score interval of a rate, for the number of trials with the same standard error,
      and with Student's t instead of the normal quantile. It leans away from the nearer bound as the rate's does.
      Source: Korn and Graubard 1998, "Confidence intervals for proportions with small expected number of positive
      counts", with Wilson's interval as in Franco, Little, Louis and Slud 2019, "Comparative study of confidence
      intervals for proportions in complex sample surveys". Differs: for any mean, not for rates alone.
    - Without bounds: Student's t. Source: Student 1908, "The probable error of a mean".
    - One value, or all values equal within the bounds: the data has no spread, yet the mean is not known exactly. See
      `interval_without_spread`. Source: Clopper and Pearson 1934; Hanley and Lippman-Hand 1983.

    With few values that are nearly all equal, every such interval is too narrow now and then; the figures are in
    `docs/methods/intervals.md`.

    Args:
        values: Independent values, such as the scores of the tasks of a list.
        confidence: Probability with which the interval should contain the expected value, in (0, 1).
        bounds: Lowest and highest value possible, or None if there are none.

    Returns:
        The mean and its interval; n counts the values.

    Raises:
        ValueError: There is no value, or a value is not finite or lies outside the bounds.
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
    """Return the rate of successes, with the score interval.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    Differs: nothing; no continuity correction.

    Args:
        successes: Trials that succeeded.
        n: Independent trials.
        confidence: As in `mean_interval`.

    Returns:
        The rate and its interval; n counts the trials.

    Raises:
        ValueError: There is no trial, or not 0 <= successes <= n.
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
    """Return the mean over all values, with an interval that is valid if values of one cluster are correlated.

    Turns of one trajectory are not independent; trajectories are. Let m be the mean of all N values and
    e_g the sum of (value - m) in cluster g of G. The standard error is sqrt(G/(G-1) sum_g e_g^2) / N,
    and `mean_interval` makes the interval from this error, with t(G-1). One cluster alone, or
    clusters with no spread between them, count as that many equal values (see `mean_interval`).

    Source: Liang and Zeger 1986, "Longitudinal data analysis using generalized linear models"; the G/(G-1)
    and t(G-1) are CR1 of Cameron and Miller 2015, "A practitioner's guide to cluster-robust inference",
    Section II. Differs: nothing for a mean without bounds; with them, see `mean_interval`.

    Args:
        values: One value a unit, such as a turn.
        clusters: The cluster of each value, such as its trajectory.
        confidence: As in `mean_interval`.
        bounds: Lowest and highest value possible, or None if there are none.

    Returns:
        The mean and its interval; n counts the clusters.

    Raises:
        ValueError: There is no value, a value is not finite or lies outside the bounds, or the two
            lists differ in length.
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

    Of a task with c successes in n episodes, C(c, k) / C(n, k) is unbiased.

    Source: Yao et al. 2024, "tau-bench: A Benchmark for Tool-Agent-User Interaction in Real-World Domains",
    arXiv:2406.12045, Section 3.
    Differs: the interval over tasks is ours.

    Args:
        outcomes: Episodes and successes of each task.
        k: Episodes that all succeed, at most the fewest of a task.
        confidence: As in `mean_interval`.

    Raises:
        ValueError: If a task has fewer episodes than k.
    """
    _check_draws(outcomes, k)
    return mean_interval([math.comb(c, k) / math.comb(n, k) for n, c in outcomes], confidence)


def pass_at(outcomes: Sequence[tuple[int, int]], k: int, confidence: float = 0.95) -> Estimate:
    """Return pass@k: the probability that any of k episodes of a task succeeds, averaged over tasks, with its interval.

    Of a task with c successes in n episodes, 1 - C(n - c, k) / C(n, k) is unbiased; 1 - (1 - c/n)^k is too low.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, Eq. 1.
    Differs: the interval over tasks is ours.

    Args:
        outcomes: Episodes and successes of each task.
        k: Episodes of which any succeeds, at most the fewest of a task.
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
    """Return the values as an array; reject an empty list, and a value that is not finite or outside the bounds."""
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
    """Return the largest difference that counts as none: by the size of values, or between bounds by their width."""
    return 1e-12 * max(1e-300, size, 0.0 if bounds is None else bounds[1] - bounds[0])


def interval_without_spread(mean: float, n: int, confidence: float, bounds: Bounds) -> tuple[float, float]:
    """Return the interval from n equal values.

    Other values may have been possible with a chance of up to q = 1 - ((1 - confidence)/2)^(1/n) without
    one showing up, and may lie anywhere between the bounds. For 0/1 values this is exact (Clopper-Pearson);
    for one value it holds by Markov's inequality. Without bounds nothing can be said.
    """
    if bounds is None:
        return -math.inf, math.inf
    unseen = 1 - ((1 - confidence) / 2) ** (1 / n)
    return mean - unseen * (mean - bounds[0]), mean + unseen * (bounds[1] - mean)


def interval_with_spread(
    mean: float, error: float, freedom: float, confidence: float, bounds: Bounds
) -> tuple[float, float]:
    """Return the interval from a standard error and its degrees of freedom; see `mean_interval`."""
    quantile = float(stats.t.ppf(0.5 + confidence / 2, freedom))
    if bounds is None:
        return mean - quantile * error, mean + quantile * error
    low, width = bounds[0], bounds[1] - bounds[0]
    rate = (mean - low) / width
    ends = _score_interval(rate, rate * (1 - rate) * (width / error) ** 2, quantile)
    return low + width * max(0.0, ends[0]), low + width * min(1.0, ends[1])


def _score_interval(rate: float, trials: float, quantile: float) -> tuple[float, float]:
    """Return Wilson's interval; scipy's takes whole trials alone."""
    centre = (rate + quantile**2 / (2 * trials)) / (1 + quantile**2 / trials)
    spread = math.sqrt(rate * (1 - rate) / trials + quantile**2 / (4 * trials**2))
    half = quantile / (1 + quantile**2 / trials) * spread
    return centre - half, centre + half


def at_bounds(sample: Floats, bounds: Bounds) -> bool:
    """Return whether every value is the lowest or the highest possible."""
    return bounds is not None and bool(((sample == bounds[0]) | (sample == bounds[1])).all())
