"""Methods against each other, paired by task and seed, corrected for how many there are, with the power of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from types import MappingProxyType
from typing import Any

from perturn.stats import (
    Bounds,
    CrossedComparison,
    crossed_bootstrap,
    crossed_comparison,
    holm,
    paired_comparison,
    smallest_difference,
)
from perturn.study.tables.study_records import BASE, Bases, Pair, Scores, rows_of, seeds_by_base, shared
from perturn.study.tables.verdict_text import verdict

LEVEL, POWER = 0.05, 0.8
EACH_ITS_OWN: Bases = MappingProxyType({})
"""No seeds share a base."""


def family(methods: Iterable[str], baseline: str, further: Iterable[Pair] = ()) -> list[Pair]:
    """Comparisons whose number p-values are corrected for.

    Those of all methods with the baseline, but for the model that nothing was taught, and further ones.
    """
    others = [method for method in dict.fromkeys(methods) if method not in (BASE, baseline)]
    return [*((method, baseline) for method in others), *further]


def compare(
    tables: Mapping[str, Scores],
    baseline: str,
    bounds: Bounds,
    bases: Bases = EACH_ITS_OWN,
    planned: Iterable[str] = (),
    further: Sequence[Pair] = (),
) -> dict[Pair, dict[str, Any]]:
    """Each method against the baseline, and further pairs, on the seeds and tasks that both have.

    Seeds of one base are averaged first, so that what a method has with a base counts once.

    Args:
        tables: Scores of each method, the baseline among them.
        baseline: Its name.
        bounds: Lowest and highest score possible, or None if there are none.
        bases: The base that each seed begins with.
        planned: Methods of the study file. Those without a score count in the correction too, since it is made for all
            that are looked for, not for those that came first.
        further: Other methods that are compared with each other.

    Returns:
        A row a pair; none for two that share nothing.
    """
    found: dict[Pair, CrossedComparison] = {}
    rows: dict[Pair, dict[str, Any]] = {}
    for pair in (*((method, baseline) for method in tables if method != baseline), *further):
        one, other = (tables.get(method, {}) for method in pair)
        seeds, tasks = shared(one, other) if one and other else ([], [])
        if tasks:
            together = seeds_by_base(seeds, bases)
            a, b = (rows_of(each, together, tasks) for each in (one, other))
            found[pair] = crossed_comparison(a, b, bounds=bounds)
            rows[pair] = {
                "baseline": pair[1],
                "seeds": seeds,
                "seeds_by_base": together,
                "tasks": len(tasks),
                **_numbers(found[pair], a, b),
                "differs": _share_of_pairs(one, other, seeds, tasks),
                "by_seed": [_seed_row(seed, one[seed], other[seed], tasks, bounds) for seed in seeds],
            }
    counted = family([*planned, *(method for method, other in rows if other == baseline)], baseline, further)
    _correct(rows, counted)
    for pair, row in rows.items():
        row["smallest_difference"] = _smallest(found[pair], len(counted) if row["counted"] else 1)
        row["verdict"] = verdict(row, LEVEL)
    return rows


def share_that_differs(scores: Scores, seeds: Sequence[int], tasks: Sequence[str]) -> float | None:
    """Share of tasks on which two seeds of one method differ, over all pairs of seeds; None for one seed."""
    pairs = list(combinations(seeds, 2))
    if not pairs or not tasks:
        return None
    return fmean(scores[one][task] != scores[other][task] for one, other in pairs for task in tasks)


def ends(low: float, high: float) -> list[float | None]:
    """Both ends of an interval; None for one that the data cannot give."""
    return [end if math.isfinite(end) else None for end in (low, high)]


def _share_of_pairs(a: Scores, b: Scores, seeds: Sequence[int], tasks: Sequence[str]) -> float:
    """Share of seeds and tasks on which two methods differ."""
    return fmean(abs(a[seed][task] - b[seed][task]) > 1e-12 for seed in seeds for task in tasks)


def _numbers(
    found: CrossedComparison, a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]
) -> dict[str, Any]:
    difference = [[x - y for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]
    return {
        "mean_difference": found.mean_difference,
        "interval": ends(found.low, found.high),
        "bootstrap": list(crossed_bootstrap(difference)),
        "p_value": found.p_value,
        "p_value_of_tasks": found.p_value_of_tasks,
        "variance": {
            "between_seeds": found.spread.between_seeds,
            "between_tasks": found.spread.between_tasks,
            "within": found.spread.within,
        },
    }


def _seed_row(
    seed: int, a: Mapping[str, float], b: Mapping[str, float], tasks: Sequence[str], bounds: Bounds
) -> dict[str, Any]:
    """One seed: its difference, and McNemar's exact test where scores are the lowest or the highest."""
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


def _correct(rows: Mapping[Pair, dict[str, Any]], counted: Sequence[Pair]) -> None:
    """Add the corrected p-values; those of comparisons that are not counted stay as they are.

    A comparison without a score has a p of 1, so that every other one is corrected as if it were the smaller.
    """
    for pair, row in rows.items():
        row["counted"] = pair in counted
    for key in ("p_value", "p_value_of_tasks"):
        known = [rows[pair][key] if pair in rows else 1.0 for pair in counted]
        corrected = dict(zip(counted, holm(known), strict=True))
        for pair, row in rows.items():
            row[f"{key}_holm"] = corrected.get(pair, row[key])


def _smallest(found: CrossedComparison, comparisons: int) -> float | None:
    """The true difference that would have been found with a chance of `POWER`, were it the only one.

    By the errors that were observed; at the strictest step of the correction. None where no score differed, so that
    nothing is known of what a difference would look like.
    """
    spreads = [one for one in (found.spread, found.spread_of_tasks) if one.error > 0]
    sizes = [
        smallest_difference(one.error, one.freedom, level=LEVEL / comparisons, power=POWER) for one in spreads
    ]
    return max(sizes, default=None)
