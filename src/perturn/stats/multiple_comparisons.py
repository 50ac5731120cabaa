"""Several comparisons at a time, and the smallest difference that one could have shown."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from perturn.stats.scipy_distributions import optimize, stats

_POINTS = 2_000
"""Values of the estimated error, by equal shares of its distribution, over which the normal one is averaged."""


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number: whichever are below a level, the chance that any is so by luck is below it.

    In ascending order, the i-th of k is multiplied by k - i + 1, and is at least the one before it, at most 1.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure". Differs: nothing.

    Args:
        p_values: One a comparison.

    Returns:
        The corrected ones, in the same order.

    Raises:
        ValueError: If one is not between 0 and 1.
    """
    if not all(0 <= each <= 1 for each in p_values):
        raise ValueError(f"p-values must lie between 0 and 1, got {list(p_values)}.")
    found, most = [0.0] * len(p_values), 0.0
    for before, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        most = max(most, min(1.0, p_values[index] * (len(p_values) - before)))
        found[index] = most
    return found


def smallest_difference(error: float, freedom: float, *, level: float = 0.05, power: float = 0.8) -> float:
    """The true difference that Student's two-sided t-test finds with a given chance.

    Source: the noncentral t distribution, as in Cohen 1988, "Statistical power analysis", Section 2. Differs: it is
    summed here, since scipy's gives NaN where freedom is low.

    Args:
        error: Standard error of the mean difference.
        freedom: Its degrees of freedom; inf: the normal distribution.
        level: Of the test.
        power: The chance of finding it.

    Returns:
        The difference, in the unit of the error.

    Raises:
        ValueError: If level or power are no shares between 0 and 1, or the power is not above the level.
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
