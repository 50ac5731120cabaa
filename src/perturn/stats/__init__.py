"""Means, rates and comparisons of scores, each with an interval.

All functions are pure and take plain numbers. `benchmarks/intervals.py` and `benchmarks/verdicts.py` measure how often
the intervals contain the true value.
"""

from perturn.stats.intervals import (
    Bounds,
    Estimate,
    cluster_interval,
    mean_interval,
    pass_at,
    pass_hat,
    rate_interval,
)
from perturn.stats.jackknife import jackknife
from perturn.stats.paired_tests import (
    PairedComparison,
    benjamini_hochberg,
    holm,
    paired_comparison,
    smallest_difference,
)
from perturn.stats.rank_correlation import kappa, rank_correlation, spearman
from perturn.stats.seeds_and_tasks import (
    CrossedComparison,
    Spread,
    crossed_bootstrap,
    crossed_comparison,
    crossed_interval,
    crossed_spread,
)

__all__ = [
    "Bounds",
    "CrossedComparison",
    "Estimate",
    "PairedComparison",
    "Spread",
    "benjamini_hochberg",
    "cluster_interval",
    "crossed_bootstrap",
    "crossed_comparison",
    "crossed_interval",
    "crossed_spread",
    "holm",
    "jackknife",
    "kappa",
    "mean_interval",
    "paired_comparison",
    "pass_at",
    "pass_hat",
    "rank_correlation",
    "rate_interval",
    "smallest_difference",
    "spearman",
]
