"""Compare methods, paired by task and seed. Correct for the number of comparisons, and compute the power of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any

from perturn.stats import (
    Bounds,
    CrossedComparison,
    benjamini_hochberg,
    crossed_bootstrap,
    crossed_comparison,
    holm,
    paired_comparison,
    smallest_difference,
)
from perturn.study.tables.study_records import (
    BASE,
    Pair,
    RecordedStudy,
    Scores,
    rows_of,
    seeds_by_base,
    shared,
    with_means,
)
from perturn.study.tables.verdict_text import verdict

LEVEL, POWER = 0.05, 0.8
TWO = 2
"""With this number of base models (or of seeds, if each has its own base model), no interval is given. Student's 97.5%
quantile is 12.7 for two values."""


def families(study: RecordedStudy, methods: Sequence[str]) -> dict[str, list[Pair]]:
    """Return the pairs of both families: `primary`, corrected by Holm's method, and `others`, with q-values.

    The model before training is in neither family, unless the study compares it explicitly.

    Args:
        study: The study.
        methods: Methods that have an episode. Methods of the study file are always included.
    """
    names = dict.fromkeys([*study.planned, *methods])
    compared = [(name, study.baseline) for name in names if name not in (BASE, study.baseline)]
    others = dict.fromkeys(pair for pair in (*compared, *study.further) if pair not in study.primary)
    return {"primary": study.primary, "others": list(others)}


def compare(study: RecordedStudy, tables: Mapping[str, Scores], bounds: Bounds) -> dict[Pair, dict[str, Any]]:
    """Compare each method with the baseline, and compare the further pairs, on their common seeds and tasks.

    Seeds with the same base model are averaged first, so that each base model counts once. The correction also counts
    planned comparisons that have no score yet.

    Args:
        study: The study, which names the comparisons.
        tables: Scores of each method, including the baseline.
        bounds: Lowest and highest possible score; None if scores are unbounded.

    Returns:
        A row for each pair of methods that has a common seed and task.
    """
    scores = with_means(tables, study.means)
    rows: dict[Pair, dict[str, Any]] = {}
    with_baseline = [(method, study.baseline) for method in tables if method != study.baseline]
    for pair in dict.fromkeys((*with_baseline, *study.further)):
        one, other = (scores.get(method, {}) for method in pair)
        seeds, tasks = shared(one, other) if one and other else ([], [])
        if tasks:
            together = seeds_by_base(seeds, study.bases)
            a, b = (rows_of(each, together, tasks) for each in (one, other))
            size = len(study.primary) if pair in study.primary else 1
            rows[pair] = {
                "baseline": pair[1],
                "seeds": seeds,
                "seeds_by_base": together,
                "tasks": len(tasks),
                **_numbers(a, b, bounds, size),
                "differs": _share_of_pairs(one, other, seeds, tasks),
                "by_seed": [_seed_row(seed, one[seed], other[seed], tasks, bounds) for seed in seeds],
            }
    _correct(rows, families(study, list(tables)))
    for row in rows.values():
        row["verdict"] = verdict(row, LEVEL)
    return rows


def share_that_differs(scores: Scores, seeds: Sequence[int], tasks: Sequence[str]) -> float | None:
    """Return the share of tasks on which two seeds of a method differ, averaged over pairs; None for one seed."""
    pairs = list(combinations(seeds, 2))
    if not pairs or not tasks:
        return None
    return fmean(scores[one][task] != scores[other][task] for one, other in pairs for task in tasks)


def ends(low: float, high: float) -> list[float | None]:
    """Return both ends of an interval, with None for an infinite or undefined end."""
    return [end if math.isfinite(end) else None for end in (low, high)]


def _share_of_pairs(a: Scores, b: Scores, seeds: Sequence[int], tasks: Sequence[str]) -> float:
    """Return the share of seeds and tasks on which the scores of two methods differ."""
    return fmean(abs(a[seed][task] - b[seed][task]) > 1e-12 for seed in seeds for task in tasks)


def _numbers(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], bounds: Bounds, size: int
) -> dict[str, Any]:
    """Return the statistics of one comparison.

    Args:
        a: Scores of the method [base models, tasks].
        b: Scores of the other method [base models, tasks].
        bounds: Lowest and highest possible score; None if scores are unbounded.
        size: Number of primary comparisons if this comparison is primary, else 1.
    """
    found = crossed_comparison(a, b, bounds=bounds)
    wide = found if size == 1 else crossed_comparison(a, b, 1 - LEVEL / size, bounds=bounds)
    difference = [[x - y for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]
    tested = len(difference) != TWO
    return {
        "mean_difference": found.mean_difference,
        "by_base": [fmean(row) for row in difference],
        "interval": ends(found.low, found.high) if tested else [None, None],
        "family_interval": ends(wide.low, wide.high) if tested else [None, None],
        "bootstrap": list(crossed_bootstrap(difference)) if tested else [None, None],
        "p_value": found.p_value if tested else None,
        "p_value_of_tasks": found.p_value_of_tasks,
        "variance": {
            "between_seeds": found.spread.between_seeds,
            "between_tasks": found.spread.between_tasks,
            "within": found.spread.within,
        },
        "smallest_difference": _smallest(found, size, len(difference[0])) if tested else None,
    }


def _seed_row(
    seed: int, a: Mapping[str, float], b: Mapping[str, float], tasks: Sequence[str], bounds: Bounds
) -> dict[str, Any]:
    """Return the comparison on one seed. McNemar's exact test is used if all scores are at their bounds."""
    one = paired_comparison(
        {task: a[task] for task in tasks}, {task: b[task] for task in tasks}, bounds=bounds
    )
    exact = one.mcnemar_p_value
    return {
        "seed": seed,
        "mean_difference": one.mean_difference,
        "interval": ends(one.low, one.high),
        "p_value": one.p_value if exact is None else exact,
        "is_mcnemar": exact is not None,
        "wins": one.wins,
        "losses": one.losses,
        "ties": one.ties,
    }


_CORRECTIONS = {"primary": holm, "others": benjamini_hochberg}


def _correct(rows: Mapping[Pair, dict[str, Any]], counted: Mapping[str, Sequence[Pair]]) -> None:
    """Add the family of each comparison, and its p-values corrected for that family.

    A comparison in no family keeps its p-values. A planned comparison without a p-value counts with a p-value of 1, so
    that it still enlarges its family.
    """
    for row in rows.values():
        row["family"] = None
    for family, pairs in counted.items():
        for key, corrected in (("p_value", "corrected"), ("p_value_of_tasks", "corrected_of_tasks")):
            known = [rows[pair][key] if pair in rows else None for pair in pairs]
            found = _CORRECTIONS[family]([1.0 if each is None else each for each in known])
            for pair, before, after in zip(pairs, known, found, strict=True):
                if pair in rows:
                    rows[pair] |= {"family": family, corrected: None if before is None else after}
    for row in rows.values():
        if row["family"] is None:
            row.update({"corrected": row["p_value"], "corrected_of_tasks": row["p_value_of_tasks"]})


def _smallest(found: CrossedComparison, comparisons: int, tasks: int) -> float | None:
    """Return the smallest true difference that this comparison would detect with probability `POWER`.

    The result uses the observed standard errors, and the level of the strictest step of the correction. It is None if
    all differences are equal, since their variance is then unknown. It is also None if the test has no p-value below
    the level with so few tasks: the smallest is 2 of 2 ** tasks.
    """
    if 2.0 ** (1 - tasks) >= LEVEL / comparisons:
        return None
    spreads = [one for one in (found.spread, found.spread_of_tasks) if one.error > 0]
    sizes = [
        smallest_difference(one.error, one.freedom, level=LEVEL / comparisons, power=POWER) for one in spreads
    ]
    return max(sizes, default=None)
