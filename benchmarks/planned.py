r"""Simulate the smallest true difference that a planned study would detect, from the variances of an earlier study.

    python benchmarks/planned.py studies/results/online --bases 10 --tasks 600 --primary 3 \
        --pairs "anchor-rloo rloo" "gigpo rloo" "tlm-dre sft"

For each of 2,000 simulated studies, a table of differences [bases, tasks] is drawn. Its variances between base models,
between tasks, and within are taken from the earlier study. Each table is tested as in a real study, at the strictest
step of Holm's correction over the primary comparisons. The command prints the true difference that is detected in 80 %
of the studies, in points. With few base models, the variance between them is uncertain, so the last column uses twice
that variance.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy import optimize, stats

from perturn.stats import crossed_spread

STUDIES, LEVEL, POWER = 2000, 0.05, 0.8


def found_variance(summary: dict[str, Any], method: str, other: str) -> dict[str, float]:
    """Return the variances of one comparison in the summary of a study.

    Raises:
        SystemExit: If the study does not compare the two methods.
    """
    for environment in summary["environments"].values():
        rows = [
            (row["method"], summary["baseline"], row["success"]["against"]) for row in environment["methods"]
        ]
        for each in (*environment["primary"], *environment["further"]):
            rows.append((each["method"], each["other"], each["success"]))
        for one, two, row in rows:
            if (one, two) == (method, other) and row:
                variance: dict[str, float] = row["variance"]
                return variance
    raise SystemExit(f"{summary['name']} does not compare {method} with {other}.")


def smallest(variance: dict[str, float], bases: int, tasks: int, primary: int, between: float = 1.0) -> float:
    """Return the difference that a share of `POWER` of the studies detects, in the unit of the scores.

    Args:
        variance: Variances of a comparison, as in a study's summary.
        bases: Number of base models in the planned study.
        tasks: Number of tasks in the planned study.
        primary: Number of primary comparisons, for the correction.
        between: Factor on the variance between base models.
    """
    draw = np.random.default_rng(0)
    means, limits = np.empty(STUDIES), np.empty(STUDIES)
    for study in range(STUDIES):
        table = draw.normal(0, np.sqrt(between * variance["between_seeds"]), (bases, 1))
        table = table + draw.normal(0, np.sqrt(variance["between_tasks"]), (1, tasks))
        table = table + draw.normal(0, np.sqrt(variance["within"]), (bases, tasks))
        spread = crossed_spread(table.tolist())
        means[study] = table.mean()
        limits[study] = spread.error * stats.t.isf(LEVEL / primary / 2, spread.freedom)

    def missing(size: float) -> float:
        return float(np.mean(np.abs(means + size) > limits)) - POWER

    return float(optimize.brentq(missing, 0.0, 2.0, xtol=1e-4))


def main() -> None:
    """Print a row for each pair."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("study", type=Path)
    words.add_argument("--bases", type=int, required=True)
    words.add_argument("--tasks", type=int, required=True)
    words.add_argument("--primary", type=int, default=1)
    words.add_argument("--pairs", nargs="+", required=True)
    args = words.parse_args()
    summary = json.loads((args.study / "summary.json").read_text(encoding="utf-8"))
    print("| comparison | smallest detectable | with twice the variance between bases |\n|---|---|---|")
    for pair in args.pairs:
        variance = found_variance(summary, *pair.split())
        sizes = [smallest(variance, args.bases, args.tasks, args.primary, factor) for factor in (1.0, 2.0)]
        print(f"| {pair} | {100 * sizes[0]:.1f} | {100 * sizes[1]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
