r"""Compare alignment losses, with the same SFT policy and pairs for each seed, on the same held-out tasks.

    python benchmarks/alignment.py recipes/scienceworld_tlm-dre_demo.yaml --seeds 0 1 2 \\
        --align "{loss: {name: tlm-dre, reduction: token_mean}}" "{loss: {name: dpo}}" --set evaluate.tasks.per_kind=24

Each `--align` is a YAML mapping that changes the recipe's `align` section. For each variant, the benchmark prints and
writes the score of every seed and task, and the difference from SFT on the same seeds. The difference is paired by task
and has an interval. The seeds of a task are averaged first.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe, read_recipe
from perturn.config.sections import Align
from perturn.data.run_folder import Run
from perturn.data.store import read_trajectories
from perturn.run.execute import run_stages
from perturn.stats import paired_comparison


def prepare(recipe: Recipe) -> Run:
    """Run the loop up to the pairs, and score the SFT policy."""
    run = Run(recipe)
    run_stages(run, names=("expert", "sft", "evaluate-sft", "explore", "pair"))
    return run


def align(base: Run, changes: dict[str, Any]) -> Run:
    """Train and score one variant from the prepared run."""
    settings = {**dataclasses.asdict(base.recipe.align), **changes}
    label = hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()[:8]
    recipe = dataclasses.replace(
        base.recipe, name=f"{base.recipe.name}-{label}", align=parse(Align, settings, "align")
    )
    run = Run(recipe)
    shutil.copy(base.paths.pairs(), run.paths.pairs())
    link = run.paths.checkpoint("sft")
    if not link.exists():
        link.symlink_to(base.paths.checkpoint("sft").resolve())
    policy = str(recipe.align.loss["name"])
    run_stages(run, names=("align", f"evaluate-{policy}"))
    shutil.rmtree(run.paths.checkpoint(policy), ignore_errors=True)
    return run


def scores(run: Run, policy: str) -> dict[str, float]:
    """Return the score of each task."""
    return {one.task.id: one.total_reward for one in read_trajectories(run.paths.evaluation(policy))}


def summarize(changes: dict[str, Any], runs: list[tuple[Run, Run]]) -> dict[str, Any]:
    """Compare one variant with SFT over all seeds."""
    policy = str(runs[0][1].recipe.align.loss["name"])
    ours = [scores(run, policy) for _, run in runs]
    sft = [scores(base, "sft") for base, _ in runs]
    tasks = sorted(ours[0])
    a = {task: sum(one[task] for one in ours) / len(ours) for task in tasks}
    b = {task: sum(one[task] for one in sft) / len(sft) for task in tasks}
    comparison = paired_comparison(a, b)
    last = [json.loads(run.paths.metrics("align").read_text().splitlines()[-1]) for _, run in runs]
    return {
        "align": changes,
        "seeds": [base.recipe.seed for base, _ in runs],
        "n_tasks": len(tasks),
        "sft": [round(sum(one.values()) / len(one), 4) for one in sft],
        "aligned": [round(sum(one.values()) / len(one), 4) for one in ours],
        "difference": dataclasses.asdict(comparison),
        "scores": {"sft": sft, "aligned": ours},
        "last_step": [
            {key: row[key] for key in row if "/" in key or key in ("loss", "coefficient")} for row in last
        ],
        "pairs": [base.manifest["stages"]["pair"]["counts"] for base, _ in runs],
    }


def main() -> None:
    """Run all variants, and print and write the results."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("recipe", type=Path)
    words.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    words.add_argument("--align", nargs="+", required=True)
    words.add_argument("--set", nargs="*", default=[], help="key=value settings laid over the recipe")
    words.add_argument("--out", type=Path, default=Path("alignment.json"))
    args = words.parse_args()
    bases = []
    for seed in args.seeds:
        recipe = read_recipe(args.recipe, [*args.set, f"seed={seed}"])
        bases.append(prepare(dataclasses.replace(recipe, name=f"{recipe.name}-seed{seed}")))
    rows = []
    for text in args.align:
        changes = yaml.safe_load(text)
        rows.append(summarize(changes, [(base, align(base, changes)) for base in bases]))
        args.out.write_text(json.dumps(rows, indent=2) + "\n")
        row, found = rows[-1], rows[-1]["difference"]
        sys.stdout.write(f"{text}: sft {row['sft']} aligned {row['aligned']} difference {found}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
