r"""Compare the mean squares of the weights of unbiased credits, on the turns that `perturn measure` stored.

    python benchmarks/credit_squares.py studies/results/measure/alfworld

The argument is the beginning of the name of a file of turns, which `docs/results/measure.md` describes. RLOO, TRLOO and
anchor-rloo have the same expected policy gradient, without a factor. If turns with large weights have gradients of the
same norm as other turns, the noise of the gradient grows with the mean square of the weights.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from perturn.stats import jackknife

CREDITS = ("trloo", "anchor-rloo")
"""Unbiased credits that are compared with RLOO."""


def main() -> None:
    """Read the file, and print each ratio with its interval over tasks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("beginning", help="such as studies/results/measure/alfworld")
    turns = pd.read_parquet(f"{parser.parse_args().beginning}-turns.parquet")
    squares = {name: turns[name].to_numpy() ** 2 for name in ("rloo", *CREDITS)}
    print(
        f"{len(turns)} turns of {turns['task'].nunique()} tasks; mean square of rloo {squares['rloo'].mean():.3f}"
    )
    for name in CREDITS:
        found = jackknife(partial(logarithm, squares[name], squares["rloo"]), turns["task"].tolist())
        assert found is not None
        mean, low, high = np.exp([found.mean, found.low, found.high])
        print(f"{name} over rloo: {mean:.2f} [{low:.2f}, {high:.2f}]")


def logarithm(above: Any, below: Any, keep: Any) -> float | None:
    """Return the logarithm of the ratio of two sums over some turns; None if a sum is not above 0."""
    sums = above[keep].sum(), below[keep].sum()
    return float(np.log(sums[0] / sums[1])) if min(sums) > 0 else None


if __name__ == "__main__":
    main()
