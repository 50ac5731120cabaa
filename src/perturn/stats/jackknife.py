"""Intervals of any statistic by leaving out clusters in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from perturn.stats.intervals import (
    Bounds,
    Estimate,
    interval_with_spread,
    interval_without_spread,
    rounding,
)

_MOST_BLOCKS = 200


def jackknife(
    statistic: Callable[[NDArray[np.bool_]], float | None],
    clusters: Sequence[Hashable],
    confidence: float = 0.95,
    *,
    bounds: Bounds = None,
) -> Estimate | None:
    """Return a statistic of clustered units with its interval.

    Let s be the statistic over all G blocks of clusters, and s_g without block g. The pseudo-values G s - (G - 1) s_g
    are treated as independent values, whose spread gives the standard error. A block is one cluster; from 200 clusters
    on, several.

    Source: Tukey 1958, "Bias and confidence in not-quite large samples"; blocks as in Kott 2001, "The delete-a-group
    jackknife".
    Differs: the interval is around s, not around the mean of the pseudo-values, and ends at the bounds; without spread
    it is the interval of equal values (see `mean_interval`).

    Args:
        statistic: From the units that count [units] to a number; None: not defined.
        clusters: The cluster of each unit, such as its task.
        confidence: As in `mean_interval`.
        bounds: Lowest and highest value possible, or None if there are none.

    Returns:
        The statistic and its interval; n counts the clusters. None if the statistic of all units is None.
    """
    found = statistic(np.ones(len(clusters), dtype=bool))
    if found is None:
        return None
    number = {cluster: index for index, cluster in enumerate(dict.fromkeys(clusters))}
    blocks = min(len(number), _MOST_BLOCKS)
    block = np.array([number[cluster] for cluster in clusters]) % blocks
    left = [statistic(block != g) for g in range(blocks)]
    pseudo = [blocks * found - (blocks - 1) * value for value in left if value is not None]
    if len(pseudo) < blocks or np.ptp(pseudo) <= rounding(1.0, None):
        low, high = interval_without_spread(found, blocks, confidence, bounds)
    else:
        error = float(np.std(pseudo, ddof=1)) / math.sqrt(blocks)
        low, high = interval_with_spread(found, error, blocks - 1, confidence, None)
    if bounds is not None:
        low, high = max(bounds[0], low), min(bounds[1], high)
    return Estimate(found, low, high, len(number))
