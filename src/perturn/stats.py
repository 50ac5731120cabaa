"""Means, rates and comparisons of scores, each with its interval.

Pure functions on plain numbers. Randomness comes from a generator of their own with a fixed seed,
so that the same scores always give the same interval and no global state is touched.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]

RESAMPLES = 10_000
SEED = 20_240_101
FEWEST_TO_RESAMPLE = 20
"""Below this many values, resampling shows too little of the tails: Student's t is used instead."""
MOST_TO_ENUMERATE = 16
"""Up to this many tasks with a difference, all 2^16 sign flips are tried and the p-value is exact."""
_CHUNK = 2_000_000  # numbers drawn at a time, to bound memory


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


@dataclass(frozen=True)
class PairedComparison:
    """How `a` compares with `b` on the tasks both have a score for; differences are a - b."""

    n: int
    mean_difference: float
    low: float
    high: float
    p_value: float
    """Two-sided: how often chance alone gives a mean difference at least this far from zero."""
    wins: int
    """Tasks on which `a` scores higher."""
    losses: int
    ties: int


def mean_interval(
    values: Sequence[float], confidence: float = 0.95, *, bounds: tuple[float, float] | None = (0.0, 1.0)
) -> Estimate:
    """Mean of independent values, with an interval for the mean they were drawn around.

    - From 20 values on: percentile bootstrap whose tails are widened for the sample size, which
      stays inside the range of the data and follows its skew.
      Source: Efron 1979, "Bootstrap methods: another look at the jackknife"; the widening is
      the "expanded percentile" of Hesterberg 2015, "What teachers should know about the bootstrap",
      arXiv:1411.5279. Differs: nothing.
    - Below 20: Student's t, cut at the bounds. Source: Student 1908, "The probable error of a mean".
    - One value, or all values equal: the data has no spread, yet the mean is not known exactly. See
      `_interval_without_spread`. Source: Clopper and Pearson 1934; Hanley and Lippman-Hand 1983.

    With few values of which nearly all are alike, every such interval is too narrow now and then.

    Args:
        values: Independent values, such as the scores of the tasks of a panel.
        confidence: How often the interval is to contain the mean that was drawn around, in (0, 1).
        bounds: Lowest and highest value possible, or None if there are none.

    Returns:
        The mean and its interval; n counts the values.

    Raises:
        ValueError: There is no value, or one that is not finite or lies outside the bounds.
    """
    sample = _checked(values, "values", bounds)
    _check_confidence(confidence)
    mean = float(sample.mean())
    if _no_spread(sample):
        low, high = _interval_without_spread(mean, len(sample), confidence, bounds)
    elif len(sample) < FEWEST_TO_RESAMPLE:
        error = float(sample.std(ddof=1)) / math.sqrt(len(sample))
        low, high = _student(mean, error, len(sample) - 1, confidence, bounds)
    else:
        low, high = _expanded_percentile(sample, confidence)
    return Estimate(mean, min(low, mean), max(high, mean), len(sample))


def rate_interval(successes: int, n: int, confidence: float = 0.95) -> Estimate:
    """Rate of successes, with the score interval.

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
    _check_confidence(confidence)
    rate = successes / n
    z = float(stats.norm.ppf(0.5 + confidence / 2))
    centre = (rate + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(rate * (1 - rate) / n + z**2 / (4 * n**2))
    return Estimate(rate, max(0.0, min(centre - half, rate)), min(1.0, max(centre + half, rate)), n)


def paired_comparison(
    a: Mapping[str, float],
    b: Mapping[str, float],
    confidence: float = 0.95,
    *,
    bounds: tuple[float, float] | None = (0.0, 1.0),
) -> PairedComparison:
    """Compare two sets of scores task by task.

    The interval is `mean_interval` of the differences, which resamples tasks, so both scores of a task
    stay together. The p-value comes from flipping signs: were `a` and `b` alike, each difference
    could as well have had the other sign. It is exact for up to 16 tasks that differ, and otherwise
    counts 10 000 random flips, the observed one included.

    Source: Fisher 1935, "The design of experiments", Section 21 (sign flips); Phipson and Smyth 2010,
    "Permutation p-values should never be zero" (counting the observed flip). Differs: nothing.

    Args:
        a: Score of each task id.
        b: Score of each task id to compare with.
        confidence: As in `mean_interval`.
        bounds: Lowest and highest score possible, or None if there are none.

    Returns:
        The comparison, over the tasks found in both.

    Raises:
        ValueError: No task is in both, or a score of such a task is not finite or outside the bounds.
    """
    shared = sorted(a.keys() & b.keys())
    if not shared:
        raise ValueError(f"no task has a score in both: {len(a)} tasks against {len(b)}, none shared.")
    first = _checked([a[task] for task in shared], "scores of a", bounds)
    second = _checked([b[task] for task in shared], "scores of b", bounds)
    difference = first - second
    difference[np.isclose(first, second, rtol=1e-12, atol=1e-12)] = 0.0
    width = None if bounds is None else (bounds[0] - bounds[1], bounds[1] - bounds[0])
    estimate = mean_interval(difference.tolist(), confidence, bounds=width)
    return PairedComparison(
        n=estimate.n,
        mean_difference=estimate.mean,
        low=estimate.low,
        high=estimate.high,
        p_value=_sign_flip_p_value(difference),
        wins=int((difference > 0).sum()),
        losses=int((difference < 0).sum()),
        ties=int((difference == 0).sum()),
    )


def cluster_interval(
    values: Sequence[float],
    clusters: Sequence[Hashable],
    confidence: float = 0.95,
    *,
    bounds: tuple[float, float] | None = (0.0, 1.0),
) -> Estimate:
    """Mean over all values, with an interval that allows for values of one cluster being alike.

    Turns of one trajectory are not independent; trajectories are. With m the mean of all N values and
    e_g the sum of (value - m) in cluster g of G, the standard error is sqrt(G/(G-1) sum_g e_g^2) / N,
    and the interval m +- t(G-1) times that, cut at the bounds. One cluster alone, or clusters with no
    spread between them, count as that many equal values (see `mean_interval`).

    Source: Liang and Zeger 1986, "Longitudinal data analysis using generalized linear models"; the G/(G-1)
    and t(G-1) are CR1 of Cameron and Miller 2015, "A practitioner's guide to cluster-robust inference",
    Section II. Differs: nothing for a mean.

    Args:
        values: One value a unit, such as a turn.
        clusters: The cluster of each value, such as its trajectory.
        confidence: As in `mean_interval`.
        bounds: Lowest and highest value possible, or None if there are none.

    Returns:
        The mean and its interval; n counts the clusters.

    Raises:
        ValueError: There is no value, one that is not finite or lies outside the bounds, or the two
            lists differ in length.
    """
    if len(values) != len(clusters):
        raise ValueError(f"expected one cluster a value, got {len(clusters)} for {len(values)} values.")
    sample = _checked(values, "values", bounds)
    _check_confidence(confidence)
    mean = float(sample.mean())
    index = {cluster: position for position, cluster in enumerate(dict.fromkeys(clusters))}
    residuals = np.zeros(len(index))
    np.add.at(residuals, [index[cluster] for cluster in clusters], sample - mean)
    count = len(index)
    rounding = 1e-12 * float(np.abs(sample).sum())
    if count == 1 or float(np.abs(residuals).max()) <= rounding:
        low, high = _interval_without_spread(mean, count, confidence, bounds)
    else:
        error = math.sqrt(count / (count - 1) * float((residuals**2).sum())) / len(sample)
        low, high = _student(mean, error, count - 1, confidence, bounds)
    return Estimate(mean, min(low, mean), max(high, mean), count)


def _checked(values: Sequence[float], name: str, bounds: tuple[float, float] | None) -> Floats:
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


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}.")


def _no_spread(sample: Floats) -> bool:
    return bool(np.ptp(sample) <= 1e-12 * max(1e-300, float(np.abs(sample).max())))


def _interval_without_spread(
    mean: float, n: int, confidence: float, bounds: tuple[float, float] | None
) -> tuple[float, float]:
    """Interval from n equal values.

    Other values may have been possible with a chance of up to q = 1 - ((1 - confidence)/2)^(1/n) without
    one showing up, and may lie anywhere between the bounds. For 0/1 values this is exact (Clopper-Pearson);
    for one value it holds by Markov's inequality. Without bounds nothing can be said.
    """
    if bounds is None:
        return -math.inf, math.inf
    unseen = 1 - ((1 - confidence) / 2) ** (1 / n)
    return mean - unseen * (mean - bounds[0]), mean + unseen * (bounds[1] - mean)


def _student(
    mean: float, error: float, freedom: int, confidence: float, bounds: tuple[float, float] | None
) -> tuple[float, float]:
    half = float(stats.t.ppf(0.5 + confidence / 2, freedom)) * error
    low, high = bounds or (-math.inf, math.inf)
    return max(low, mean - half), min(high, mean + half)


def _expanded_percentile(sample: Floats, confidence: float) -> tuple[float, float]:
    n = len(sample)
    quantile = math.sqrt(n / (n - 1)) * float(stats.t.ppf(0.5 + confidence / 2, n - 1))
    tail = float(stats.norm.sf(quantile))
    low, high = np.quantile(_resampled_means(sample), [tail, 1 - tail])
    return float(low), float(high)


def _resampled_means(sample: Floats) -> Floats:
    """Mean of each resample with replacement [resamples]."""
    generator = np.random.default_rng(SEED)
    n = len(sample)
    return np.concatenate(
        [sample[generator.integers(0, n, (rows, n))].mean(axis=1) for rows in _chunks(RESAMPLES, n)]
    )


def _sign_flip_p_value(difference: Floats) -> float:
    """Share of sign flips whose sum is at least as far from zero as the observed one."""
    moving = np.abs(difference[difference != 0])
    if moving.size == 0:
        return 1.0
    observed = abs(float(difference.sum())) - 1e-9 * float(moving.sum())  # equal sums may differ in rounding
    if moving.size <= MOST_TO_ENUMERATE:
        codes = np.arange(2**moving.size)[:, None] >> np.arange(moving.size) & 1
        return float((np.abs((1.0 - 2.0 * codes) @ moving) >= observed).mean())
    generator = np.random.default_rng(SEED)
    extreme = 1
    for rows in _chunks(RESAMPLES - 1, moving.size):
        signs = 1.0 - 2.0 * generator.integers(0, 2, (rows, moving.size))
        extreme += int((np.abs(signs @ moving) >= observed).sum())
    return extreme / RESAMPLES


def _chunks(total: int, width: int) -> Iterator[int]:
    """Row counts that add up to total, each small enough to hold `rows * width` numbers at once."""
    rows = max(1, _CHUNK // width)
    yield from repeat(rows, total // rows)
    if total % rows:
        yield total % rows


__all__ = [
    "Estimate",
    "PairedComparison",
    "cluster_interval",
    "mean_interval",
    "paired_comparison",
    "rate_interval",
]
