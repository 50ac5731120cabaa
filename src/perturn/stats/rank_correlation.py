"""Rank correlation, with its interval."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

from perturn.stats.intervals import Estimate, interval_with_spread, interval_without_spread, rounding, stats

_MOST_BLOCKS = 200


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
    if len(pseudo) < blocks or np.ptp(pseudo) <= rounding(1.0, None):
        low, high = interval_without_spread(found, blocks, confidence, (-1.0, 1.0))
    else:
        error = float(np.std(pseudo, ddof=1)) / math.sqrt(blocks)
        low, high = interval_with_spread(found, error, blocks - 1, confidence, None)
    return Estimate(found, max(-1.0, low), min(1.0, high), len(number))
