r"""Compare the variance of RLOO's advantages with that of measured and of exact advantages.

    python benchmarks/advantage_noise.py studies/results/measure/alfworld

The argument is the beginning of the names of two files that `docs/results/measure.md` describes: turns with their
measured advantages, and continuations.

RLOO and the advantage have the same expected policy gradient. Its noise grows with the mean square of a turn's number,
if this number says nothing of the length of the turn's gradient. So the ratio of the mean squares is the number of
episodes of RLOO that are worth one episode with the advantage. For exact advantages, the mean square is that of the
measured ones without the variance of their noise. No unbiased credit has a smaller one than these.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from perturn.stats import jackknife

STATE = ["task", "state"]


def read(beginning: str) -> tuple[pd.DataFrame, int]:
    """Return the turns with the variance of each advantage's noise, and the number of continuations of a point."""
    turns = pd.read_parquet(f"{beginning}-turns.parquet")
    played = pd.read_parquet(f"{beginning}-continuations.parquet").query("outcome == 'counted' and not acted")
    episodes = turns.groupby(["task", "sample"], sort=False)
    turns["state"] = episodes["action"].transform(
        lambda said: ["\n".join(said[:n]) for n in range(len(said))]
    )
    states = turns[["task", "sample", "turn", "state"]]
    points = played.merge(states, on=["task", "sample", "turn"]).groupby(STATE)["reward"]
    counts = points.count()
    noise = (points.var() / counts).rename("noise").reset_index()
    turns = turns.merge(noise, on=STATE, how="left")
    after = turns.groupby(["task", "sample"], sort=False)["noise"].shift(-1, fill_value=0.0)
    turns["noise"] += after
    assert turns["noise"].notna().all(), "some turns have no continuations"
    return turns, int(counts.min())


def main() -> None:
    """Read the files, and print both ratios with intervals over tasks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("beginning", help="such as studies/results/measure/alfworld")
    turns, continuations = read(parser.parse_args().beginning)
    rloo, measured, noise = (turns[name].to_numpy() for name in ("rloo", "advantage", "noise"))
    print(f"{len(turns)} turns of {turns['task'].nunique()} tasks, {continuations} continuations of a point")
    print(f"mean square of rloo {np.mean(rloo**2):.3f}, of the measured advantage {np.mean(measured**2):.3f}")
    print(f"mean square of the exact advantage {np.mean(measured**2 - noise):.3f}")
    exact = measured**2 - noise
    for name, above, below in (
        ("rloo over exact", rloo**2, exact),
        ("rloo over measured", rloo**2, measured**2),
        ("anchor-rloo over rloo", turns["anchor-rloo"].to_numpy() ** 2, rloo**2),
        ("trloo over rloo", turns["trloo"].to_numpy() ** 2, rloo**2),
    ):
        found = jackknife(partial(logarithm, above, below), turns["task"].tolist())
        assert found is not None
        mean, low, high = np.exp([found.mean, found.low, found.high])
        print(f"{name}: {mean:.2f} [{low:.2f}, {high:.2f}]")


def logarithm(above: Any, below: Any, keep: Any) -> float | None:
    """Return the logarithm of the ratio of two sums over some turns; None if a sum is not above 0."""
    sums = above[keep].sum(), below[keep].sum()
    return float(np.log(sums[0] / sums[1])) if min(sums) > 0 else None


if __name__ == "__main__":
    main()
