"""Score policies before and after online training on further tasks.

    PERTURN_DATA=... python benchmarks/online/score.py runs/online --split valid_train
    PERTURN_DATA=... python benchmarks/online/score.py runs/online --split valid_seen --sampled

The command writes a run OUT/scores/TASKS/POLICY for each policy, in about ten seconds. TASKS is `valid_train`, or
`valid_seen-sampled` for actions sampled at temperature 1 as in training. `table.py --task-lists` reads the scores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from perturn.run.execute import open_run, run_stages
from run import HERE, METHODS, SEEDS, find_games


def score(out: Path, task_list: str, name: str, policy: Path, seed: int) -> None:
    """Score one policy on a task list, unless it is done."""
    split, _, sampled = task_list.partition("-")
    words = [
        f"output={out / 'scores' / task_list}",
        f"name={name}",
        f"seed={seed}",
        f"model.name={policy}",
        f"evaluate.tasks.split={split}",
        f"evaluate.sampling.temperature={float(bool(sampled))}",
    ]
    with open_run(HERE / "score.yaml", words) as run:
        run_stages(run)


def main() -> None:
    """Score all policies that exist."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("out", type=Path)
    words.add_argument("--split", default="valid_train")
    words.add_argument("--sampled", action="store_true", help="draw actions at temperature 1")
    words.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    words.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    words.add_argument("--iterations", type=int, default=60, help="score the policies after so many")
    args = words.parse_args()
    torch.set_num_threads(1)
    find_games()
    out, task_list = args.out.resolve(), args.split + ("-sampled" if args.sampled else "")
    for seed in args.seeds:
        score(out, task_list, f"sft-{seed}", out / f"sft-{seed}" / "checkpoints" / "sft", seed)
        for method in args.methods:
            for policy in (out / f"{method}-{seed}" / "checkpoints").glob(f"*-{args.iterations:03d}"):
                score(out, task_list, f"{method}-{seed}{policy.name[-4:]}", policy, seed)


if __name__ == "__main__":
    main()
