"""Rank correlation and agreement of raters, with their intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from perturn.stats.intervals import Estimate, stats
from perturn.stats.jackknife import jackknife

Statistic = Callable[[Sequence[float], Sequence[float]], float | None]
"""Statistic from -1 to 1 of two values for each unit; None if it is undefined."""


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, with mean ranks for ties; None if all values of `a` or of `b` are equal."""
    if len(a) != len(b):
        raise ValueError(f"expected as many values of a as of b, got {len(a)} and {len(b)}.")
    first, second = (stats.rankdata(values) - (len(values) + 1) / 2 for values in (a, b))
    scale = math.sqrt(float((first**2).sum()) * float((second**2).sum()))
    return max(-1.0, min(1.0, float((first * second).sum()) / scale)) if scale else None


def kappa(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return Cohen's kappa of two raters, with quadratic weights; None if there are no ratings, or all are equal.

    The result is 1 - D / E, with D the mean of (a_i - b_i)^2, and E the mean of (a_i - b_j)^2 over all i and j. Ratings
    need not be whole numbers.

    Source: Cohen 1968, "Weighted kappa: nominal scale agreement with provision for scaled disagreement or partial
    credit".
    """
    if len(a) != len(b):
        raise ValueError(f"expected as many values of a as of b, got {len(a)} and {len(b)}.")
    if not len(a):
        return None
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    by_chance = float(first.var() + second.var() + (first.mean() - second.mean()) ** 2)
    return 1.0 - float(((first - second) ** 2).mean()) / by_chance if by_chance else None


def rank_correlation(
    a: Sequence[float],
    b: Sequence[float],
    clusters: Sequence[Hashable],
    confidence: float = 0.95,
    *,
    statistic: Statistic | None = None,
) -> Estimate | None:
    """Return Spearman's rank correlation, or another statistic of pairs from -1 to 1, with its interval.

    The interval comes from `jackknife`, so that it is valid if values of one cluster are correlated. It is cut at -1
    and 1.

    Args:
        a: One value for each unit, such as a turn.
        b: Another value for each of the same units.
        clusters: The cluster of each unit, such as its task.
        confidence: As in `mean_interval`.
        statistic: Statistic of two sequences, such as `kappa`. If None, Spearman's rank correlation is used.

    Returns:
        The statistic and its interval, with n the number of clusters; None if the statistic of all units is None.
    """
    statistic = statistic or spearman
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    of = statistic
    return jackknife(
        lambda keep: of(first[keep].tolist(), second[keep].tolist()), clusters, confidence, bounds=(-1.0, 1.0)
    )
