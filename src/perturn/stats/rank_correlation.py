"""Rank correlation and agreement, with their interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from perturn.stats.intervals import Estimate, stats
from perturn.stats.jackknife import jackknife

Statistic = Callable[[Sequence[float], Sequence[float]], float | None]
"""A number from -1 to 1 that two values of each unit have; None where it is not defined."""


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, ties by their mean rank; None if either has no two different values."""
    if len(a) != len(b):
        raise ValueError(f"expected as many values of a as of b, got {len(a)} and {len(b)}.")
    first, second = (stats.rankdata(values) - (len(values) + 1) / 2 for values in (a, b))
    scale = math.sqrt(float((first**2).sum()) * float((second**2).sum()))
    return max(-1.0, min(1.0, float((first * second).sum()) / scale)) if scale else None


def kappa(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return Cohen's kappa with quadratic weights of two raters; None if all ratings of both are one value.

    1 - sum_i (a_i - b_i)^2 / n over the mean of (a_i - b_j)^2 over all i and j. Ratings need be no whole numbers.

    Source: Cohen 1968, "Weighted kappa: nominal scale agreement with provision for scaled disagreement or partial
    credit".
    """
    if len(a) != len(b):
        raise ValueError(f"expected as many values of a as of b, got {len(a)} and {len(b)}.")
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

    The interval is valid if values of one cluster are correlated; it comes from `jackknife`, and ends at -1 and 1.

    Args:
        a: One value a unit, such as a turn.
        b: Another of the same units.
        clusters: The cluster of each unit, such as its task.
        confidence: As in `mean_interval`.
        statistic: Of two sequences, such as `kappa`; None: Spearman's rank correlation.

    Returns:
        The correlation and its interval; n counts the clusters. None if the statistic of all units is None.
    """
    statistic = statistic or spearman
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    of = statistic
    return jackknife(
        lambda keep: of(first[keep].tolist(), second[keep].tolist()), clusters, confidence, bounds=(-1.0, 1.0)
    )
