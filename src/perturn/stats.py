"""Means, rates and comparisons of scores, each with its interval.

Pure functions on plain numbers. The flips of the sign test come from a generator of their own with a fixed seed, so
that the same scores always give the same p-value and no global state is touched. How often the intervals hold,
`benchmarks/intervals.py` measures.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
Bounds = tuple[float, float] | None
"""Lowest and highest value possible; None: there are none."""

FLIPS = 10_000
SEED = 20_240_101
MOST_TO_ENUMERATE = 16
"""Up to this many tasks with a difference, all 2^16 sign flips are tried and the p-value is exact."""
_MOST_BLOCKS = 200
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
    """Two-sided: how often flipped signs give a mean difference at least this far from zero. Holds if the differences
    are as likely to lie on either side, the same distance from zero, were `a` and `b` alike."""
    mcnemar_p_value: float | None
    """Two-sided and exact, of wins against losses alone; None unless all scores are the lowest or the highest."""
    wins: int
    """Tasks on which `a` scores higher."""
    losses: int
    ties: int


def mean_interval(
    values: Sequence[float], confidence: float = 0.95, *, bounds: Bounds = (0.0, 1.0)
) -> Estimate:
    """Mean of independent values, with an interval for the mean they were drawn around.

    - Values that are all the lowest or the highest possible: the score interval of a rate. See `rate_interval`.
    - Others between bounds: the score interval of a rate, for as many trials as would have the standard error
      found, and Student's t in place of the normal quantile. It leans away from the nearer bound as the rate's does.
      Source: Korn and Graubard 1998, "Confidence intervals for proportions with small expected number of positive
      counts", with Wilson's interval as in Franco, Little, Louis and Slud 2019, "Comparative study of confidence
      intervals for proportions in complex sample surveys". Differs: for any mean, not for rates alone.
    - Without bounds: Student's t. Source: Student 1908, "The probable error of a mean".
    - One value, or all values equal within the bounds: the data has no spread, yet the mean is not known exactly. See
      `_interval_without_spread`. Source: Clopper and Pearson 1934; Hanley and Lippman-Hand 1983.

    With few values of which nearly all are alike, every such interval is too narrow now and then: `docs/methods.md`
    has the figures.

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
    if bounds is not None and _at_bounds(sample, bounds):
        rate = rate_interval(int((sample == bounds[1]).sum()), len(sample), confidence)
        low, high = (bounds[0] + end * (bounds[1] - bounds[0]) for end in (rate.low, rate.high))
    elif np.ptp(sample) <= _rounding(float(np.abs(sample).max()), bounds):
        low, high = _interval_without_spread(mean, len(sample), confidence, bounds)
    else:
        error = float(sample.std(ddof=1)) / math.sqrt(len(sample))
        low, high = _interval_with_spread(mean, error, len(sample) - 1, confidence, bounds)
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
    low, high = map(float, stats.binomtest(successes, n).proportion_ci(confidence, "wilson"))
    return Estimate(rate, max(0.0, min(low, rate)), min(1.0, max(high, rate)), n)


def paired_comparison(
    a: Mapping[str, float],
    b: Mapping[str, float],
    confidence: float = 0.95,
    *,
    bounds: Bounds = (0.0, 1.0),
) -> PairedComparison:
    """Compare two sets of scores task by task.

    The interval is `mean_interval` of the differences, so both scores of a task stay together; where each score is the
    lowest or the highest, that of a difference of paired rates. The p-value comes from flipping signs: were `a` and
    `b` alike, each difference could as well have had the other sign. As a test of the mean it assumes that the
    differences are symmetric around it: rare large gains against many small losses can be significant either way. It
    is exact for up to 16 tasks that differ, and otherwise counts 10 000 random flips, the observed one included. Where
    scores are the lowest or the highest, McNemar's exact test stands beside it, which assumes nothing of the kind.

    Source: Fisher 1935, "The design of experiments", Section 21 (sign flips); Phipson and Smyth 2010,
    "Permutation p-values should never be zero" (counting the observed flip); Bonett and Price 2012, "Adjusted Wald
    confidence interval for a difference of binomial proportions based on paired data" (the interval); McNemar
    1947, "Note on the sampling error of the difference between correlated proportions". Differs: nothing.

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
    wins, losses = int((difference > 0).sum()), int((difference < 0).sum())
    mean, binary = float(difference.mean()), _at_bounds(first, bounds) and _at_bounds(second, bounds)
    low, high = _interval_of_difference(difference, confidence, bounds, binary)
    return PairedComparison(
        n=len(shared),
        mean_difference=mean,
        low=min(low, mean),
        high=max(high, mean),
        p_value=_sign_flip_p_value(difference),
        mcnemar_p_value=_mcnemar_p_value(wins, losses) if binary else None,
        wins=wins,
        losses=losses,
        ties=len(shared) - wins - losses,
    )


def _interval_of_difference(
    difference: Floats, confidence: float, bounds: Bounds, binary: bool
) -> tuple[float, float]:
    """Interval of the mean of paired differences [tasks]; of paired rates, where scores are lowest or highest."""
    if bounds is None:
        estimate = mean_interval(difference.tolist(), confidence, bounds=None)
        return estimate.low, estimate.high
    width = bounds[1] - bounds[0]
    if binary:
        return _interval_of_paired_rates(difference, confidence, width)
    estimate = mean_interval(difference.tolist(), confidence, bounds=(-width, width))
    return estimate.low, estimate.high


def cluster_interval(
    values: Sequence[float],
    clusters: Sequence[Hashable],
    confidence: float = 0.95,
    *,
    bounds: Bounds = (0.0, 1.0),
) -> Estimate:
    """Mean over all values, with an interval that allows for values of one cluster being alike.

    Turns of one trajectory are not independent; trajectories are. With m the mean of all N values and
    e_g the sum of (value - m) in cluster g of G, the standard error is sqrt(G/(G-1) sum_g e_g^2) / N,
    and the interval the one that `mean_interval` makes of such an error, with t(G-1). One cluster alone, or
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
    rounding = _rounding(float(np.abs(sample).sum()), bounds)
    if count == 1 or float(np.abs(residuals).max()) <= rounding:
        low, high = _interval_without_spread(mean, count, confidence, bounds)
    else:
        error = math.sqrt(count / (count - 1) * float((residuals**2).sum())) / len(sample)
        low, high = _interval_with_spread(mean, error, count - 1, confidence, bounds)
    return Estimate(mean, min(low, mean), max(high, mean), count)


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation, ties by their mean rank; None if either has no two different values."""
    if len(a) != len(b):
        raise ValueError(f"expected as many values of a as of b, got {len(a)} and {len(b)}.")
    first, second = (stats.rankdata(values) - (len(values) + 1) / 2 for values in (a, b))
    scale = math.sqrt(float((first**2).sum()) * float((second**2).sum()))
    return max(-1.0, min(1.0, float((first * second).sum()) / scale)) if scale else None


def rank_correlation(
    a: Sequence[float], b: Sequence[float], clusters: Sequence[Hashable], confidence: float = 0.95
) -> Estimate | None:
    """Spearman's rank correlation, with an interval that allows for values of one cluster being alike.

    With r over all G blocks of clusters and r_g without block g, the pseudo-values G r - (G - 1) r_g are treated as
    independent values, whose spread gives the standard error. A block is one cluster; from 200 clusters on, several.

    Source: Tukey 1958, "Bias and confidence in not-quite large samples"; blocks as in Kott 2001, "The delete-a-group
    jackknife".
    Differs: the interval is around r, not around the mean of the pseudo-values, and ends at -1 and 1; without spread it
    is that of equal values (see `mean_interval`).

    Args:
        a: One value a unit, such as a turn.
        b: Another of the same units.
        clusters: The cluster of each unit, such as its task.
        confidence: As in `mean_interval`.

    Returns:
        The correlation and its interval; n counts the clusters. None if either has no two different values.
    """
    found = spearman(a, b)
    if found is None:
        return None
    number = {cluster: index for index, cluster in enumerate(dict.fromkeys(clusters))}
    blocks = min(len(number), _MOST_BLOCKS)
    block = np.array([number[cluster] for cluster in clusters]) % blocks
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    left = [spearman(*(each[block != g].tolist() for each in (first, second))) for g in range(blocks)]
    pseudo = [blocks * found - (blocks - 1) * value for value in left if value is not None]
    if len(pseudo) < blocks or np.ptp(pseudo) <= _rounding(1.0, None):
        low, high = _interval_without_spread(found, blocks, confidence, (-1.0, 1.0))
    else:
        error = float(np.std(pseudo, ddof=1)) / math.sqrt(blocks)
        low, high = _interval_with_spread(found, error, blocks - 1, confidence, None)
    return Estimate(found, max(-1.0, low), min(1.0, high), len(number))


def _checked(values: Sequence[float], name: str, bounds: Bounds) -> Floats:
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


def _rounding(size: float, bounds: Bounds) -> float:
    """The largest difference that counts as none: by the size of values, or between bounds by their width."""
    return 1e-12 * max(1e-300, size, 0.0 if bounds is None else bounds[1] - bounds[0])


def _interval_without_spread(mean: float, n: int, confidence: float, bounds: Bounds) -> tuple[float, float]:
    """Interval from n equal values.

    Other values may have been possible with a chance of up to q = 1 - ((1 - confidence)/2)^(1/n) without
    one showing up, and may lie anywhere between the bounds. For 0/1 values this is exact (Clopper-Pearson);
    for one value it holds by Markov's inequality. Without bounds nothing can be said.
    """
    if bounds is None:
        return -math.inf, math.inf
    unseen = 1 - ((1 - confidence) / 2) ** (1 / n)
    return mean - unseen * (mean - bounds[0]), mean + unseen * (bounds[1] - mean)


def _interval_with_spread(
    mean: float, error: float, freedom: int, confidence: float, bounds: Bounds
) -> tuple[float, float]:
    quantile = float(stats.t.ppf(0.5 + confidence / 2, freedom))
    if bounds is None:
        return mean - quantile * error, mean + quantile * error
    low, width = bounds[0], bounds[1] - bounds[0]
    rate = (mean - low) / width
    ends = _score_interval(rate, rate * (1 - rate) * (width / error) ** 2, quantile)
    return low + width * max(0.0, ends[0]), low + width * min(1.0, ends[1])


def _score_interval(rate: float, trials: float, quantile: float) -> tuple[float, float]:
    """Wilson's interval; scipy's takes whole trials alone."""
    centre = (rate + quantile**2 / (2 * trials)) / (1 + quantile**2 / trials)
    spread = math.sqrt(rate * (1 - rate) / trials + quantile**2 / (4 * trials**2))
    half = quantile / (1 + quantile**2 / trials) * spread
    return centre - half, centre + half


def _interval_of_paired_rates(difference: Floats, confidence: float, width: float) -> tuple[float, float]:
    """Interval of a difference of two rates of one panel, as if one win and one loss more had been seen."""
    seen = np.append(difference, [width, -width])
    mean = float(seen.mean())
    half = float(stats.norm.ppf(0.5 + confidence / 2)) * float(seen.std()) / math.sqrt(len(seen))
    return max(-width, mean - half), min(width, mean + half)


def _mcnemar_p_value(wins: int, losses: int) -> float:
    """McNemar's exact test; 1 where no task differs."""
    return float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def _sign_flip_p_value(difference: Floats) -> float:
    """Share of sign flips whose sum is at least as far from zero as the observed one.

    As scipy's `permutation_test`, but fifty times as fast where all flips are tried.
    """
    moving = np.abs(difference[difference != 0])
    if moving.size == 0:
        return 1.0
    observed = abs(float(difference.sum())) - 1e-9 * float(moving.sum())  # equal sums may differ in rounding
    if moving.size <= MOST_TO_ENUMERATE:
        codes = np.arange(2**moving.size)[:, None] >> np.arange(moving.size) & 1
        return float((np.abs((1.0 - 2.0 * codes) @ moving) >= observed).mean())
    generator = np.random.default_rng(SEED)
    extreme = 1
    rows = max(1, _CHUNK // moving.size)
    for begun in range(1, FLIPS, rows):
        signs = 1.0 - 2.0 * generator.integers(0, 2, (min(rows, FLIPS - begun), moving.size))
        extreme += int((np.abs(signs @ moving) >= observed).sum())
    return extreme / FLIPS


def _at_bounds(sample: Floats, bounds: Bounds) -> bool:
    """Whether every value is the lowest or the highest possible."""
    return bounds is not None and bool(((sample == bounds[0]) | (sample == bounds[1])).all())
