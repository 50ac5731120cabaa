"""Rank correlation and agreement, with their interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from perturn.stats.intervals import Estimate, interval_with_spread, interval_without_spread, rounding, stats

_MOST_BLOCKS = 200

Statistic = Callable[[Sequence[float], Sequence[float]], float | None]
"""A number from -1 to 1 that two values of each unit have; None where it is not defined."""


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation, ties by their mean rank; None if either has no two different values."""
    if len(a) != len(b):
        raise ValueError(f"expected as many values of a as of b, got {len(a)} and {len(b)}.")
    first, second = (stats.rankdata(values) - (len(values) + 1) / 2 for values in (a, b))
    scale = math.sqrt(float((first**2).sum()) * float((second**2).sum()))
    return max(-1.0, min(1.0, float((first * second).sum()) / scale)) if scale else None


def kappa(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Cohen's kappa with quadratic weights of two raters; None if all ratings of both are one value.

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

    The interval allows for values of one cluster being alike. With r over all G blocks of clusters and r_g without
    block g, the pseudo-values G r - (G - 1) r_g are treated as independent values, whose spread gives the standard
    error. A block is one cluster; from 200 clusters on, several.

    Source: Tukey 1958, "Bias and confidence in not-quite large samples"; blocks as in Kott 2001, "The delete-a-group
    jackknife".
    Differs: the interval is around r, not around the mean of the pseudo-values, and ends at -1 and 1; without spread it
    is that of equal values (see `mean_interval`).

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
    found = statistic(a, b)
    if found is None:
        return None
    number = {cluster: index for index, cluster in enumerate(dict.fromkeys(clusters))}
    blocks = min(len(number), _MOST_BLOCKS)
    block = np.array([number[cluster] for cluster in clusters]) % blocks
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    left = [statistic(*(each[block != g].tolist() for each in (first, second))) for g in range(blocks)]
    pseudo = [blocks * found - (blocks - 1) * value for value in left if value is not None]
    if len(pseudo) < blocks or np.ptp(pseudo) <= rounding(1.0, None):
        low, high = interval_without_spread(found, blocks, confidence, (-1.0, 1.0))
    else:
        error = float(np.std(pseudo, ddof=1)) / math.sqrt(blocks)
        low, high = interval_with_spread(found, error, blocks - 1, confidence, None)
    return Estimate(found, max(-1.0, low), min(1.0, high), len(number))
