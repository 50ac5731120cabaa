"""Two sets of scores compared task by task.

The flips of the sign test come from a generator of their own with a fixed seed. So the same scores always give the same
p-value, and no global state is touched.
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
"""Up to this many tasks with a difference, all 2^16 sign flips are tried and the p-value is exact."""
_CHUNK = 2_000_000  # numbers drawn at a time, to bound memory


@dataclass(frozen=True)
class PairedComparison:
    """Comparison of `a` with `b` on the tasks that both have a score for; differences are a - b."""

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


def paired_comparison(
    a: Mapping[str, float],
    b: Mapping[str, float],
    confidence: float = 0.95,
    *,
    bounds: Bounds = (0.0, 1.0),
) -> PairedComparison:
    """Compare two sets of scores task by task.

    The interval is `mean_interval` of the differences, so both scores of a task stay together; where each score is the
    lowest or the highest, the interval of a difference of paired rates. The p-value comes from flipping signs: without
    an effect, each difference could as well have had the other sign. As a test of the mean it assumes that the
    differences are symmetric around it: rare large gains against many small losses can be significant either way. It is
    exact for up to 16 tasks that differ, and otherwise counts 10 000 random flips, the observed one included. Where
    scores are the lowest or the highest, McNemar's exact test, which makes no such assumption, is added.

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
    """Return the interval of the mean of paired differences [tasks], or of paired rates for scores at their bounds."""
    if bounds is None:
        estimate = mean_interval(difference.tolist(), confidence, bounds=None)
        return estimate.low, estimate.high
    width = bounds[1] - bounds[0]
    if binary:
        return _interval_of_paired_rates(difference, confidence, width)
    estimate = mean_interval(difference.tolist(), confidence, bounds=(-width, width))
    return estimate.low, estimate.high


def _interval_of_paired_rates(difference: Floats, confidence: float, width: float) -> tuple[float, float]:
    """Return the interval of a paired difference of rates, with one win and one loss added."""
    seen = np.append(difference, [width, -width])
    mean = float(seen.mean())
    half = float(stats.norm.ppf(0.5 + confidence / 2)) * float(seen.std()) / math.sqrt(len(seen))
    return max(-width, mean - half), min(width, mean + half)


def _mcnemar_p_value(wins: int, losses: int) -> float:
    """Return McNemar's exact test; 1 where no task differs."""
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


_POINTS = 2_000
"""Values of the estimated error, by equal shares of its distribution, over which the normal one is averaged."""


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number, which bounds the chance of any false finding.

    In ascending order, the i-th of k is multiplied by k - i + 1, and is at least the one before it, at most 1.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure". Differs: nothing.

    Args:
        p_values: One a comparison.

    Returns:
        The corrected ones, in the same order.

    Raises:
        ValueError: If one is not between 0 and 1.
    """
    _check_p_values(p_values)
    found, most = [0.0] * len(p_values), 0.0
    for before, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        most = max(most, min(1.0, p_values[index] * (len(p_values) - before)))
        found[index] = most
    return found


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Return q-values: among comparisons with a q below a level, the expected share of false ones is below that level.

    In descending order, the i-th smallest of k is multiplied by k / i, and is at most the one after it.

    Source: Benjamini and Hochberg 1995, "Controlling the false discovery rate"; as adjusted p-values Yekutieli and
    Benjamini 1999, Eq. 4. Differs: nothing. It holds for independent and for positively dependent comparisons, such as
    several methods against one baseline.

    Args:
        p_values: One a comparison.

    Returns:
        The q-values, in the same order.

    Raises:
        ValueError: If one is not between 0 and 1.
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
    """Return the true difference that Student's two-sided t-test finds with a given chance.

    Source: the noncentral t distribution, as in Cohen 1988, "Statistical power analysis", Section 2. Differs: it is
    summed here, since scipy's gives NaN where freedom is low.

    Args:
        error: Standard error of the mean difference.
        freedom: Its degrees of freedom; inf: the normal distribution.
        level: Of the test.
        power: The power: the probability of finding the difference.

    Returns:
        The difference, in the unit of the error.

    Raises:
        ValueError: If level or power are not between 0 and 1, or the power is not above the level.
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
