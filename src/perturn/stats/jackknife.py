"""Intervals of any statistic from a jackknife over clusters."""

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
    are treated as independent values, whose spread gives the standard error. Each block is one cluster. With more than
    200 clusters, a block holds several.

    Source: Tukey 1958, "Bias and confidence in not-quite large samples"; blocks as in Kott 2001, "The delete-a-group
    jackknife".
    Differs: the interval is centred on s, not on the mean of the pseudo-values, and is cut at the bounds. Without
    spread it is the interval of equal values (see `mean_interval`). It extends to the bounds if the statistic is
    undefined without some block, since s then rests on that block alone.

    Args:
        statistic: Function from a mask of the included units [units] to the statistic, or to None if it is undefined.
        clusters: The cluster of each unit, such as its task.
        confidence: As in `mean_interval`.
        bounds: Lowest and highest possible value; None if the statistic is unbounded.

    Returns:
        The statistic and its interval, with n the number of clusters; None if the statistic of all units is None.
    """
    found = statistic(np.ones(len(clusters), dtype=bool))
    if found is None:
        return None
    number = {cluster: index for index, cluster in enumerate(dict.fromkeys(clusters))}
    blocks = min(len(number), _MOST_BLOCKS)
    block = np.array([number[cluster] for cluster in clusters]) % blocks
    left = [statistic(block != g) for g in range(blocks)]
    pseudo = [blocks * found - (blocks - 1) * value for value in left if value is not None]
    if len(pseudo) < blocks:
        low, high = -math.inf, math.inf
    elif np.ptp(pseudo) <= rounding(1.0, None):
        low, high = interval_without_spread(found, blocks, confidence, bounds)
    else:
        error = float(np.std(pseudo, ddof=1)) / math.sqrt(blocks)
        low, high = interval_with_spread(found, error, blocks - 1, confidence, None)
    if bounds is not None:
        low, high = max(bounds[0], low), min(bounds[1], high)
    return Estimate(found, low, high, len(number))
