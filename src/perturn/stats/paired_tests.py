"""Compare two sets of scores task by task.

The random flips of the sign test come from a separate generator with a fixed seed. So equal scores always give the same
p-value, and no global state changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perturn.stats.intervals import Bounds, Floats, at_bounds, checked, mean_interval, optimize, stats

FLIPS = 10_000
SEED = 20_240_101
MOST_TO_ENUMERATE = 16
"""Number of differing tasks up to which all sign flips (2^16 at most) are enumerated, so that the p-value is exact."""
_CHUNK = 2_000_000  # random signs drawn at a time, which bounds the memory


@dataclass(frozen=True)
class PairedComparison:
    """Comparison of `a` with `b` on the tasks for which both have a score. Differences are a - b."""

    n: int
    mean_difference: float
    low: float
    high: float
    p_value: float
    """Two-sided p-value: how often randomly flipped signs give a mean difference at least as far from zero. It is valid
    if the differences would be symmetric around zero without an effect."""
    mcnemar_p_value: float | None
    """Two-sided exact p-value of wins against losses; None unless all scores lie at their bounds."""
    wins: int
    """Number of tasks on which `a` scores higher."""
    losses: int
    ties: int


def paired_comparison(
    a: Mapping[str, float],
    b: Mapping[str, float],
    confidence: float = 0.95,
    *,
    bounds: Bounds = (0.0, 1.0),
) -> PairedComparison:
    """Compare two sets of scores task by task.

    The interval is `mean_interval` of the differences, which keeps both scores of a task together. If all scores lie at
    their bounds, it is the interval of a difference of paired rates. The p-value comes from a sign-flip test: without
    an effect, each difference could have had the other sign. As a test of the mean, it assumes that the differences are
    symmetric around their mean. Otherwise, rare large gains with many small losses can be significant in either
    direction. The p-value is exact for up to 16 tasks that differ. For more tasks it counts 10 000 random flips,
    including the observed signs. If all scores lie at their bounds, McNemar's exact test is added, which does not
    assume symmetry.

    Source: Fisher 1935, "The design of experiments", Section 21 (sign flips); Phipson and Smyth 2010,
    "Permutation p-values should never be zero" (counting the observed flip); Bonett and Price 2012, "Adjusted Wald
    confidence interval for a difference of binomial proportions based on paired data" (the interval); McNemar
    1947, "Note on the sampling error of the difference between correlated proportions". Differs: nothing.

    Args:
        a: Score of each task id.
        b: Score of each task id on the other side.
        confidence: As in `mean_interval`.
        bounds: Lowest and highest possible score; None if scores are unbounded.

    Returns:
        The comparison over the tasks that are in both.

    Raises:
        ValueError: If no task is in both, or a score of a common task is not finite or outside the bounds.
    """
    shared = sorted(a.keys() & b.keys())
    if not shared:
        raise ValueError(f"no task has a score in both: {len(a)} tasks against {len(b)}, none shared.")
    first = checked([a[task] for task in shared], "scores of a", bounds)
    second = checked([b[task] for task in shared], "scores of b", bounds)
    difference = first - second
    difference[np.isclose(first, second, rtol=1e-12, atol=1e-12)] = 0.0
    wins, losses = int((difference > 0).sum()), int((difference < 0).sum())
    mean, binary = float(difference.mean()), at_bounds(first, bounds) and at_bounds(second, bounds)
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
    """Return the interval of the mean paired difference [tasks], or of paired rates if scores lie at their bounds."""
    if bounds is None:
        estimate = mean_interval(difference.tolist(), confidence, bounds=None)
        return estimate.low, estimate.high
    width = bounds[1] - bounds[0]
    if binary:
        return _interval_of_paired_rates(difference, confidence, width)
    estimate = mean_interval(difference.tolist(), confidence, bounds=(-width, width))
    return estimate.low, estimate.high


def _interval_of_paired_rates(difference: Floats, confidence: float, width: float) -> tuple[float, float]:
    """Return the interval of a difference of paired rates, after adding one win and one loss."""
    seen = np.append(difference, [width, -width])
    mean = float(seen.mean())
    half = float(stats.norm.ppf(0.5 + confidence / 2)) * float(seen.std()) / math.sqrt(len(seen))
    return max(-width, mean - half), min(width, mean + half)


def _mcnemar_p_value(wins: int, losses: int) -> float:
    """Return McNemar's exact p-value; 1 if no task differs."""
    return float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def _sign_flip_p_value(difference: Floats) -> float:
    """Return the share of sign flips whose sum is at least as far from zero as the observed sum.

    The result agrees with scipy's `permutation_test`. With all flips enumerated, it is fifty times as fast.
    """
    moving = np.abs(difference[difference != 0])
    if moving.size == 0:
        return 1.0
    observed = abs(float(difference.sum())) - 1e-9 * float(moving.sum())  # equal sums may round apart
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


_POINTS = 2_000
"""Number of equally likely values of the estimated error over which the power is averaged."""


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for the number of comparisons, which bounds the probability of any false finding.

    The i-th smallest of k p-values is multiplied by k - i + 1. The result is at most 1, and not smaller than the
    corrected p-value before it.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure". Differs: nothing.

    Args:
        p_values: One p-value for each comparison.

    Returns:
        The corrected p-values, in the same order.

    Raises:
        ValueError: If a p-value is not between 0 and 1.
    """
    _check_p_values(p_values)
    found, most = [0.0] * len(p_values), 0.0
    for before, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        most = max(most, min(1.0, p_values[index] * (len(p_values) - before)))
        found[index] = most
    return found


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Return q-values. Among comparisons with q below a level, the expected share of false findings is below it.

    The i-th smallest of k p-values is multiplied by k / i. The result is not larger than the q-value after it.

    Source: Benjamini and Hochberg 1995, "Controlling the false discovery rate"; as adjusted p-values Yekutieli and
    Benjamini 1999, Eq. 4. Differs: nothing. The guarantee holds for independent and for positively dependent
    comparisons, such as several methods against one baseline.

    Args:
        p_values: One p-value for each comparison.

    Returns:
        The q-values, in the same order.

    Raises:
        ValueError: If a p-value is not between 0 and 1.
    """
    _check_p_values(p_values)
    found, least = [0.0] * len(p_values), 1.0
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    for rank, index in reversed(list(enumerate(order, 1))):
        least = min(least, p_values[index] * len(p_values) / rank)
        found[index] = least
    return found


def _check_p_values(p_values: Sequence[float]) -> None:
    if not all(0 <= each <= 1 for each in p_values):
        raise ValueError(f"p-values must lie between 0 and 1, got {list(p_values)}.")


def smallest_difference(error: float, freedom: float, *, level: float = 0.05, power: float = 0.8) -> float:
    """Return the true difference that Student's two-sided t-test detects with a given power.

    Source: the noncentral t distribution, as in Cohen 1988, "Statistical power analysis", Section 2. Differs: the
    distribution is summed numerically, since scipy's function returns NaN for few degrees of freedom.

    Args:
        error: Standard error of the mean difference.
        freedom: Degrees of freedom of the error; inf for the normal distribution.
        level: Significance level of the test.
        power: Probability of detecting the difference.

    Returns:
        The difference, in the unit of the error.

    Raises:
        ValueError: If level or power is not between 0 and 1, or if the power is not above the level.
    """
    if not 0 < level < power < 1:
        raise ValueError(f"expected 0 < level < power < 1, got level {level} and power {power}.")
    quantile = float(stats.t.isf(level / 2, freedom))
    shares = (np.arange(_POINTS) + 0.5) / _POINTS
    spread = np.sqrt(stats.chi2.ppf(shares, freedom) / freedom) if math.isfinite(freedom) else np.ones(1)

    def missing(size: float) -> float:
        found = stats.norm.sf(quantile * spread - size) + stats.norm.cdf(-quantile * spread - size)
        return float(found.mean()) - power

    return error * float(optimize.brentq(missing, 0.0, 10 * quantile + 10))
