"""Train the small ALFWorld policy online, with one run for each method and seed.

    PERTURN_DATA=... python benchmarks/online/run.py runs/online --methods rloo anchor-rloo --seeds 0 1 2

The command trains the base model OUT/base and the SFT policies OUT/sft-N. From each SFT policy it trains the runs
OUT/METHOD-N, which take ten to fifteen minutes on one core. A second call resumes killed runs. `table.py` compares the
runs.
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
"""Recipe of each method in this folder, and the settings that it changes."""
SEEDS = [0, 1, 2]


def learn(out: Path, method: str, seed: int, words: list[str]) -> None:
    """Run the missing stages of a run."""
    recipe, own = METHODS[method]
    start = out / f"sft-{seed}" / "checkpoints" / "sft"
    fixed = [f"name={method}-{seed}", f"output={out}", f"seed={seed}", f"model.name={start}"]
    with open_run(HERE / recipe, [*fixed, *own, *words]) as run:
        run_stages(run)


def begin(out: Path, seed: int) -> None:
    """Train the base model, which all seeds share, and then train it on the actions of 1500 expert episodes."""
    with open_run(HERE / "base.yaml", [f"output={out}"]) as run:
        run_stages(run)
    base = out / "base" / "checkpoints" / "base"
    words = [f"model.name={base}", f"output={out}", f"name=sft-{seed}", f"seed={seed}"]
    with open_run(HERE / "sft.yaml", words) as run:
        run_stages(run)


def find_games() -> None:
    """Set the folder of ALFWorld's games, if PERTURN_DATA is set."""
    if "PERTURN_DATA" in os.environ:
        os.environ.setdefault("ALFWORLD_DATA", f"{os.environ['PERTURN_DATA']}/alfworld")


def main() -> None:
    """Run the methods seed by seed, so that the first seed of all methods is finished first."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("out", type=Path)
    words.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    words.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    words.add_argument("--set", nargs="*", default=[], help="key=value settings laid over the recipe")
    args = words.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(HERE))  # for flipped:Flipped
    find_games()
    for seed in args.seeds:
        begin(args.out.resolve(), seed)
        for method in args.methods:
            began = time.monotonic()
            learn(args.out.resolve(), method, seed, args.set)
            print(f"{method}-{seed}: {(time.monotonic() - began) / 60:.1f} min", flush=True)


if __name__ == "__main__":
    main()
