"""Means and differences of scores of several seeds on the same tasks, which generalize to other seeds and tasks.

Seeds and tasks are both samples, and every seed plays every task. Scores of one seed are correlated, and so are scores
of one task. So 3 x 140 scores are not 420 independent scores. An interval over tasks alone would also be too narrow,
since it ignores the variation between seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from perturn.stats.intervals import (
    Bounds,
    Estimate,
    Floats,
    check_confidence,
    checked,
    interval_with_spread,
    mean_interval,
    rounding,
    stats,
)
from perturn.stats.paired_tests import paired_comparison

DRAWS = 2_000
SEED = 20_240_101


@dataclass(frozen=True)
class Spread:
    """Standard error of a mean over seeds and tasks, and its components."""

    error: float
    freedom: float
    """Degrees of freedom of the error; inf if the error is 0."""
    between_seeds: float
    """Variance between seeds, averaged over all tasks; 0 if no larger than chance, or for one seed."""
    between_tasks: float
    """Variance between tasks, averaged over all seeds; 0 if no larger than chance."""
    within: float
    """Residual variance, of a task under a seed."""


@dataclass(frozen=True)
class CrossedComparison:
    """Comparison of `a` with `b` on the seeds and tasks that both have. Differences are a - b."""

    seeds: int
    tasks: int
    mean_difference: float
    low: float
    high: float
    p_value: float
    """Two-sided p-value that generalizes to other seeds and other tasks."""
    p_value_of_tasks: float
    """Two-sided p-value that generalizes to other tasks, but not to other seeds. With one seed and scores at their
    bounds it is McNemar's exact test, and else the sign-flip test of the tasks' means."""
    spread: Spread
    spread_of_tasks: Spread
    """Spread of the comparison for these seeds only, which does not generalize to other seeds."""


def crossed_spread(values: Sequence[Sequence[float]]) -> Spread:
    """Return the standard error of a table's mean, for generalizing to other seeds and other tasks.

    With S seeds, T tasks, and the mean squares of a two-way analysis of variance (MS_s between seeds, MS_t between
    tasks, MS_e of the residual):

        error^2 = (MS_s + max(MS_t - MS_e, 0)) / (S T)
        freedom = (MS_s + max(MS_t - MS_e, 0))^2 / (MS_s^2 / (S - 1))

    With one seed, tasks count as independent. With one task, seeds count as independent.

    Source: Hillis 2007, "A comparison of denominator degrees of freedom methods for multiple observer ROC analysis",
    Statistics in Medicine 26, for readers (here seeds) who read the same cases (here tasks). The question comes from
    Clark 1973, "The language-as-fixed-effect fallacy". Differs: the freedom is at most S T - 1.

    Args:
        values: Table of scores [seeds, tasks].

    Raises:
        ValueError: If there is no value, or the rows differ in length.
    """
    table = _table(values)
    count, width = table.shape
    by_seed, by_task = table.mean(1), table.mean(0)
    rest = table - by_seed[:, None] - by_task + table.mean()
    if min(count, width) == 1:
        squares = float(table.var(ddof=1)) if table.size > 1 else 0.0
        of_seeds, of_tasks = (0.0, squares) if count == 1 else (squares, 0.0)
        return Spread(math.sqrt(squares / table.size), table.size - 1 or math.inf, of_seeds, of_tasks, 0.0)
    seeds = width * float(by_seed.var(ddof=1))
    tasks = count * float(by_task.var(ddof=1))
    left = float((rest**2).sum()) / ((count - 1) * (width - 1))
    own = max(tasks - left, 0.0)
    total = seeds + own
    freedom = (count - 1) * (total / seeds) ** 2 if seeds > 0 else math.inf
    return Spread(
        error=math.sqrt(total / table.size),
        freedom=min(freedom, table.size - 1.0),
        between_seeds=max(seeds - left, 0.0) / width,
        between_tasks=own / count,
        within=left,
    )


def crossed_interval(
    values: Sequence[Sequence[float]], confidence: float = 0.95, *, bounds: Bounds = (0.0, 1.0)
) -> Estimate:
    """Return the mean over seeds and tasks, with an interval that generalizes to other seeds and other tasks.

    The interval is the wider of two intervals: from `crossed_spread`, and from the tasks' means for these seeds only.
    The mean for all seeds cannot be better known than the mean for these seeds. The second interval ensures this even
    if few seeds agree by chance. With 2 or 3 seeds that differ, the interval is wide, since so few seeds say little
    about others. Student's quantile for 2 degrees of freedom is 4.3.

    Args:
        values: Table of scores [seeds, tasks].
        confidence: As in `mean_interval`.
        bounds: As in `mean_interval`.

    Returns:
        The mean and its interval, with n the number of tasks.
    """
    table = _table(values)
    check_confidence(confidence)
    checked(table.ravel().tolist(), "values", bounds)
    of_tasks = mean_interval(table.mean(0).tolist(), confidence, bounds=bounds)
    return _wider(of_tasks, table, confidence, bounds)


def crossed_comparison(
    a: Sequence[Sequence[float]],
    b: Sequence[Sequence[float]],
    confidence: float = 0.95,
    *,
    bounds: Bounds = (0.0, 1.0),
) -> CrossedComparison:
    """Compare two tables of scores, paired by seed and task.

    Two tests are combined: Student's t of the mean difference with the error of `crossed_spread`, and
    `paired_comparison` of the tasks' means. The result has the wider interval and the larger p-value. With one seed it
    is `paired_comparison`, with McNemar's exact test if all scores lie at their bounds. docs/verdicts.md reports how
    often the intervals and p-values are correct.

    Args:
        a: Table of scores [seeds, tasks].
        b: Scores of the other side on the same seeds and tasks [seeds, tasks].
        confidence: As in `mean_interval`.
        bounds: As in `paired_comparison`.

    Raises:
        ValueError: If the tables differ in shape, or if `paired_comparison` rejects the scores.
    """
    first, second = _table(a), _table(b)
    if first.shape != second.shape:
        raise ValueError(f"expected tables of one shape, got {first.shape} and {second.shape}.")
    count, width = first.shape
    left, right = ({str(i): float(x) for i, x in enumerate(side.mean(0))} for side in (first, second))
    of_tasks = paired_comparison(left, right, confidence, bounds=bounds)
    exact = of_tasks.mcnemar_p_value if count == 1 else None
    p_value = of_tasks.p_value if exact is None else exact
    difference = first - second
    difference[np.isclose(first, second, rtol=1e-12, atol=1e-12)] = 0.0
    spread = crossed_spread(difference.tolist())
    reach = None if bounds is None else (bounds[0] - bounds[1], bounds[1] - bounds[0])
    found = _wider(
        Estimate(of_tasks.mean_difference, of_tasks.low, of_tasks.high, width), difference, confidence, reach
    )
    return CrossedComparison(
        seeds=count,
        tasks=width,
        mean_difference=found.mean,
        low=found.low,
        high=found.high,
        p_value=p_value if count == 1 else max(p_value, _p_value(found.mean, spread)),
        p_value_of_tasks=p_value,
        spread=spread,
        spread_of_tasks=crossed_spread([difference.mean(0).tolist()]),
    )


def crossed_bootstrap(
    values: Sequence[Sequence[float]], confidence: float = 0.95, *, draws: int = DRAWS, seed: int = SEED
) -> tuple[float, float]:
    """Return the percentile interval of the mean, with seeds and tasks each resampled with replacement.

    The interval is too narrow if few seeds differ, since resampling 3 seeds cannot show how different a fourth seed may
    be. It is too wide if seeds do not differ, since both resamplings count the same noise. Report `crossed_interval`
    instead.

    Source: Owen 2007, "The pigeonhole bootstrap", Annals of Applied Statistics 1; McCullagh 2000, "Resampling and
    exchangeable arrays". Differs: nothing.

    Args:
        values: Table of scores [seeds, tasks].
        confidence: As in `mean_interval`.
        draws: Number of resampled tables.
        seed: Seed of the resampling.
    """
    table = _table(values)
    check_confidence(confidence)
    count, width = table.shape
    rows, columns = _resampled(count, width, draws, seed)
    # Sums of counts: exact for successes, so that they do not depend on the processor's order of summation.
    means = ((rows @ table) * columns).sum(1) / (count * width)
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return float(low), float(high)


@lru_cache(maxsize=8)
def _resampled(count: int, width: int, draws: int, seed: int) -> tuple[Floats, NDArray[np.int64]]:
    """Return how often each resampled table has each seed [draws, seeds] and each task [draws, tasks]."""
    generator = np.random.default_rng(seed)
    rows = generator.multinomial(count, np.full(count, 1 / count), size=draws).astype(np.float64)
    columns = generator.multinomial(width, np.full(width, 1 / width), size=draws)
    for each in (rows, columns):
        each.flags.writeable = False
    return rows, columns


def _table(values: Sequence[Sequence[float]]) -> Floats:
    if not values or not all(len(row) == len(values[0]) > 0 for row in values):
        raise ValueError("expected a row per seed, all of one length and with at least one task each.")
    return np.asarray(values, dtype=np.float64)


def _wider(found: Estimate, table: Floats, confidence: float, bounds: Bounds) -> Estimate:
    """Widen an interval of the tasks' means to the interval over seeds and tasks where that interval is wider."""
    spread, mean = crossed_spread(table.tolist()), float(table.mean())
    low, high = found.low, found.high
    if table.shape[0] > 1 and spread.error > rounding(float(np.abs(table).max()), bounds):
        ends = interval_with_spread(mean, spread.error, spread.freedom, confidence, bounds)
        low, high = min(low, ends[0]), max(high, ends[1])
    return Estimate(mean, min(low, mean), max(high, mean), table.shape[1])


def _p_value(mean: float, spread: Spread) -> float:
    """Return the two-sided p-value of Student's t. For an error of 0 it is 0, so that the test over tasks decides."""
    if spread.error == 0:
        return 0.0
    return 2 * float(stats.t.sf(abs(mean) / spread.error, spread.freedom))
