"""Means, rates and comparisons of scores, each with its interval.

Pure functions on plain numbers. How often the intervals hold, `benchmarks/intervals.py` and `benchmarks/verdicts.py`
measure.
"""

from perturn.stats.crossed import (
    CrossedComparison,
    Spread,
    crossed_bootstrap,
    crossed_comparison,
    crossed_interval,
    crossed_spread,
)
from perturn.stats.intervals import Bounds, Estimate, cluster_interval, mean_interval, rate_interval
from perturn.stats.paired import PairedComparison, paired_comparison
from perturn.stats.ranks import rank_correlation, spearman
from perturn.stats.several import holm, smallest_difference

__all__ = [
    "Bounds",
    "CrossedComparison",
    "Estimate",
    "PairedComparison",
    "Spread",
    "cluster_interval",
    "crossed_bootstrap",
    "crossed_comparison",
    "crossed_interval",
    "crossed_spread",
    "holm",
    "mean_interval",
    "paired_comparison",
    "rank_correlation",
    "rate_interval",
    "smallest_difference",
    "spearman",
]
