r"""Simulate how often a study's test and intervals err with few seeds, for Perturn, for tasks alone, and the bootstrap.

    python benchmarks/verdicts.py --out benchmarks/verdicts.json      two minutes on one core
    python benchmarks/verdicts.py --quick                             a tenth of the studies
    python benchmarks/verdicts.py --bases                             seeds that share bases, alone; seconds

Studies of two policies with known true success are simulated. Games differ in difficulty. Both policies share noise for
each game under a seed, like two alignments of one SFT policy. Each policy also has its own noise for each game, for
each game under a seed, and, of size `luck`, for all games of a seed. The policies have equal true success, so every
difference that is found is an error. The share of such errors is the level, nominally 0.05. The command also prints how
often the 95 % interval of a policy's success contains the true value. The standard error of a share of 0.05 is 0.013
for 300 studies.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

import perturn.stats.paired_tests
from perturn.stats import crossed_bootstrap, crossed_comparison, crossed_interval, smallest_difference

Table = list[list[float]]
SIZES = ((1, 140), (2, 140), (3, 140), (5, 140), (10, 140), (3, 340), (5, 340))
LUCK = {"none": 0.0, "some": 0.05, "much": 0.2}
"""Standard deviation of a policy's own noise for a seed, relative to the noise of an episode."""
DRAW = np.random.default_rng(0)
perturn.stats.paired_tests.FLIPS = 1000


def scores(seeds: int, tasks: int, luck: float) -> tuple[Table, Table]:
    """Return the successes of two policies with equal true success."""
    shared = 0.6 + DRAW.normal(0, 1.2, (1, tasks)) + DRAW.normal(0, 0.45, (seeds, tasks))

    def own() -> NDArray[np.float64]:
        noise = DRAW.normal(0, luck, (seeds, 1)) + DRAW.normal(0, 0.05, (1, tasks))
        return noise + DRAW.normal(0, 0.1, (seeds, tasks))

    a, b = ((shared + own() > 0).astype(float).tolist() for _ in range(2))
    return a, b


def true_success(luck: float) -> float:
    """Return the true success of such a policy over all seeds and games."""
    return float(stats.norm.cdf(0.6 / np.sqrt(1.2**2 + 0.45**2 + 0.05**2 + 0.1**2 + luck**2)))


def cell(seeds: int, tasks: int, luck: float, studies: int) -> dict[str, Any]:
    """Return the shares of errors over many studies, and medians of the detectable differences."""
    truth, rows = true_success(luck), []
    for _ in range(studies):
        a, b = scores(seeds, tasks, luck)
        found, alone = crossed_comparison(a, b), crossed_interval(a)
        difference = (np.array(a) - np.array(b)).tolist()
        low, high = crossed_bootstrap(difference, draws=400)
        ends = crossed_bootstrap(a, draws=400)
        spreads = [each for each in (found.spread, found.spread_of_tasks) if each.error > 0]
        seen = max((smallest_difference(each.error, each.freedom) for each in spreads), default=np.nan)
        rows.append(
            (
                np.mean(np.array(a) != np.array(b)),
                found.p_value < 0.05,
                found.p_value_of_tasks < 0.05,
                low > 0 or high < 0,
                alone.low <= truth <= alone.high,
                ends[0] <= truth <= ends[1],
                50 * (found.high - found.low),
                100 * seen,
            )
        )
    values = np.array(rows, dtype=float)
    keys = ("differs", "level", "level_tasks", "level_bootstrap", "coverage", "coverage_bootstrap")
    shares = {key: round(float(values[:, i].mean()), 4) for i, key in enumerate(keys)}
    medians = {
        key: round(float(np.nanmedian(values[:, i])), 2) for i, key in ((6, "half_width"), (7, "seen"))
    }
    return shares | medians


def shared_bases(seeds: int, bases: int, studies: int, tasks: int = 140) -> tuple[float, float]:
    """Return the error rates by seed and by base model, if a gain depends on the base model and averages to 0."""
    wrong = np.zeros(2)
    for _ in range(studies):
        shared = DRAW.normal(0, 2, (1, tasks)) + DRAW.logistic(size=(seeds, tasks))
        gain = DRAW.normal(0, 0.2, bases)[np.arange(seeds) % bases] + DRAW.normal(0, 0.05, seeds)
        a, b = (
            (shared + own + DRAW.normal(0, 0.3, shared.shape) > 0).astype(float)
            for own in (gain[:, None], 0.0)
        )
        once = [np.array([side[base::bases].mean(0) for base in range(bases)]).tolist() for side in (a, b)]
        wrong[0] += crossed_comparison(a.tolist(), b.tolist()).p_value < 0.05
        wrong[1] += crossed_comparison(once[0], once[1]).p_value < 0.05
    by_seed, by_base = (wrong / studies).tolist()
    return by_seed, by_base


def print_shared_bases(studies: int) -> None:
    """Print a table of `shared_bases`."""
    print("| seeds | bases | level by seed | level by base |")
    print("|---" * 4 + "|")
    for seeds, bases in ((6, 2), (10, 3), (10, 5), (10, 10)):
        by_seed, by_base = shared_bases(seeds, bases, studies)
        print(f"| {seeds} | {bases} | {by_seed:.3f} | {by_base:.3f} |", flush=True)


def main() -> None:
    """Print a table, and write it."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--out", type=Path)
    words.add_argument("--quick", action="store_true")
    words.add_argument("--bases", action="store_true")
    args = words.parse_args()
    studies = 30 if args.quick else 300
    if args.bases:
        print_shared_bases(studies)
        return
    rows = []
    print(
        "| seeds x tasks | luck | differ | level | tasks alone | bootstrap | coverage | bootstrap | half width | seen |"
    )
    print("|---" * 10 + "|")
    for seeds, tasks in SIZES:
        for name, luck in LUCK.items():
            row = {"seeds": seeds, "tasks": tasks, "luck": name, "studies": studies}
            row |= cell(seeds, tasks, luck, studies)
            rows.append(row)
            shown = [f"{row[key]:.3f}" for key in list(row)[4:10]] + [
                f"{row[key]:.1f}" for key in list(row)[10:]
            ]
            print(f"| {seeds} x {tasks} | {name} | {' | '.join(shown)} |", flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
