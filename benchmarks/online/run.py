"""Online learning from the small ALFWorld policy: one run for each method and seed.

    PERTURN_DATA=... python benchmarks/online/run.py runs/online --methods rloo anchor-rloo --seeds 0 1 2

makes the base OUT/base and the SFT policies OUT/sft-N, and from each of these the run OUT/METHOD-N; ten to fifteen
minutes of one core each. A run that was killed goes on where it was. `table.py` compares.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

from perturn.run.execute import open_run, run_stages

HERE = Path(__file__).parent
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "rloo": ("groups.yaml", ("credit.name=rloo",)),
    "anchor-rloo": ("groups.yaml", ("credit.name=anchor-rloo",)),
    "grpo": ("groups.yaml", ("credit.name=grpo",)),
    "gigpo": ("groups.yaml", ("credit.name=gigpo",)),
    "tlm-dre": ("pairs.yaml", ()),
    "rloo-flipped": ("groups.yaml", ("credit.name=flipped:Flipped",)),
}
"""Method -> its recipe beside this file, and the words laid over it."""
SEEDS = [0, 1, 2]


def learn(out: Path, method: str, seed: int, words: list[str]) -> None:
    """Do what a run lacks."""
    recipe, own = METHODS[method]
    start = out / f"sft-{seed}" / "checkpoints" / "sft"
    fixed = [f"name={method}-{seed}", f"output={out}", f"seed={seed}", f"model.name={start}"]
    with open_run(HERE / recipe, [*fixed, *own, *words]) as run:
        run_stages(run)


def begin(out: Path, seed: int) -> None:
    """Make the base, which all seeds share, and teach it the actions of 1500 expert episodes."""
    with open_run(HERE / "base.yaml", [f"output={out}"]) as run:
        run_stages(run)
    base = out / "base" / "checkpoints" / "base"
    words = [f"model.name={base}", f"output={out}", f"name=sft-{seed}", f"seed={seed}"]
    with open_run(HERE / "sft.yaml", words) as run:
        run_stages(run)


def find_games() -> None:
    """Tell where ALFWorld's games are, if PERTURN_DATA says it."""
    if "PERTURN_DATA" in os.environ:
        os.environ.setdefault("ALFWORLD_DATA", f"{os.environ['PERTURN_DATA']}/alfworld")


def main() -> None:
    """Run the methods, seed by seed, so that the first seed of all is there first."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("out", type=Path)
    words.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    words.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    words.add_argument("--set", nargs="*", default=[], help="key=value settings laid over the recipe")
    args = words.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(HERE))  # where flipped:Flipped is
    find_games()
    for seed in args.seeds:
        begin(args.out.resolve(), seed)
        for method in args.methods:
            began = time.monotonic()
            learn(args.out.resolve(), method, seed, args.set)
            print(f"{method}-{seed}: {(time.monotonic() - began) / 60:.1f} min", flush=True)


if __name__ == "__main__":
    main()
