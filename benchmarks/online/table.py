r"""Compare policies before and after online training: a table, its numbers, and learning curves.

    python benchmarks/online/table.py runs/online --out benchmarks/online/results.json \
        --figure docs/figures/online_alfworld.svg

For each method, the table has the success of the first and the last policy on valid_seen, or on the task lists of
`--task-lists`. It also has the difference paired by game, for each seed and over all seeds. The first interval over all
seeds is clustered by game, so it generalizes to other games. The second interval is Student's t over the seeds'
differences, so it generalizes to other SFT seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from perturn.data.run_paths import RunPaths
from perturn.data.store import read_trajectories
from perturn.stats import cluster_interval, mean_interval, paired_comparison
from perturn.types import succeeded
from run import METHODS, SEEDS

Scores = dict[str, float]
"""Success in each game, by the game's id."""
OWN = "valid_seen"
"""Task list that a run itself scores, with greedy decoding."""
HEAD = "| method | seeds | n | SFT | after | difference | over games, 95 % | over seeds, 95 % | p | by seed |"


def scores(file: Path) -> Scores:
    """Return the success in each game of an evaluation."""
    return {one.task.id: float(succeeded(one)) for one in read_trajectories(file)}


def evaluations(out: Path, method: str, seed: int, last: int) -> list[tuple[int, Scores]]:
    """Return (iteration, scores) for the evaluations of a run up to an iteration. Iteration 0 is the first policy."""
    folder = RunPaths(out / f"{method}-{seed}").folder / "evaluation"
    found = {0 if file.stem == "base" else int(file.stem[-3:]): file for file in folder.glob("*.jsonl")}
    return [(number, scores(found[number])) for number in sorted(found) if number <= last]


def ends(
    out: Path, task_lists: Sequence[str], method: str, seed: int, curve: Sequence[tuple[int, Scores]]
) -> tuple[Scores, Scores]:
    """Return the scores of the last and the first policy of a run, from the run (`OWN`) or from `score.py`."""

    def everywhere(scored: Scores, name: str) -> Scores:
        found = {} if OWN not in task_lists else dict(scored)
        for task_list in task_lists:
            if task_list != OWN:
                folder = RunPaths(out / "scores" / task_list / name).folder
                found |= scores(folder / "evaluation" / "base.jsonl")
        return found

    (_, before), (last, after) = curve[0], curve[-1]
    return everywhere(after, f"{method}-{seed}-{last:03d}"), everywhere(before, f"sft-{seed}")


def compare(pairs: Mapping[int, tuple[Scores, Scores]]) -> dict[str, Any]:
    """Compare a method's last policy with its first policy over seeds.

    Args:
        pairs: Results of `ends` for each seed.
    """
    tasks = sorted(next(iter(pairs.values()))[0])
    if any(set(side) != set(tasks) for pair in pairs.values() for side in pair):
        raise SystemExit("the evaluations are not of the same games; let run.py and score.py finish.")
    differences = [(task, after[task] - before[task]) for after, before in pairs.values() for task in tasks]
    averaged = [
        {task: mean(pair[side][task] for pair in pairs.values()) for task in tasks} for side in (0, 1)
    ]
    by_seed = {seed: paired_comparison(*pair) for seed, pair in pairs.items()}
    pooled = cluster_interval(
        [value for _, value in differences], [task for task, _ in differences], bounds=(-1, 1)
    )
    over_seeds = mean_interval([each.mean_difference for each in by_seed.values()], bounds=(-1, 1))
    return {
        "n": len(tasks),
        "before": {seed: mean(before.values()) for seed, (_, before) in pairs.items()},
        "after": {seed: mean(after.values()) for seed, (after, _) in pairs.items()},
        "by_seed": {seed: asdict(each) for seed, each in by_seed.items()},
        "pooled": asdict(pooled),
        "over_seeds": asdict(over_seeds) if len(by_seed) > 1 else None,
        "p_value": paired_comparison(*averaged).p_value,
    }


def row(method: str, found: Mapping[str, Any]) -> str:
    """Return one line of the table, in percentage points."""
    pooled, seeds = found["pooled"], found["over_seeds"]
    each = ", ".join(f"{100 * one['mean_difference']:+.1f}" for one in found["by_seed"].values())
    cells = [
        f"`{method}`",
        str(len(found["by_seed"])),
        str(found["n"]),
        f"{100 * mean(found['before'].values()):.1f}",
        f"{100 * mean(found['after'].values()):.1f}",
        f"{100 * pooled['mean']:+.1f}",
        span(pooled),
        span(seeds) if seeds else "",
        f"{found['p_value']:.4f}",
        each,
    ]
    return f"| {' | '.join(cells)} |"


def span(found: Mapping[str, Any]) -> str:
    """Return an interval as text, in percentage points."""
    return f"[{100 * found['low']:+.1f}, {100 * found['high']:+.1f}]"


def explored(out: Path, method: str, seed: int, last: int) -> list[float]:
    """Return the success rate of each iteration's exploration, which samples at temperature 1 on train games."""
    files = sorted((out / f"{method}-{seed}" / "trajectories").glob("explore-*.jsonl"))[:last]
    return [mean(succeeded(one) for one in read_trajectories(file)) for file in files]


def draw(rows: Mapping[str, Any], file: Path) -> None:
    """Draw the success in exploration (mean of five iterations) and in evaluation. A line is a mean over seeds."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "perturn"  # makes the file reproducible
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
    for method, found in rows.items():
        lines = [smoothed(each) for each in found["explored"].values()]
        length = min(map(len, lines))
        left.plot(
            range(1, length + 1), [mean(line[at] for line in lines) for at in range(length)], label=method
        )
        curves = [dict(curve) for curve in found["curves"].values()]
        numbers = [number for number in curves[0] if all(number in curve for curve in curves)]
        right.plot(numbers, [mean(curve[number] for curve in curves) for number in numbers], "o-")
    left.set(xlabel="iteration", ylabel="success", title="exploration, train games", ylim=(0, 1))
    right.set(xlabel="iteration", title="valid_seen, greedy")
    left.legend(frameon=False, fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})


def smoothed(values: Sequence[float], width: int = 5) -> list[float]:
    """Return moving averages of the last `width` values."""
    return [mean(values[max(0, at - width + 1) : at + 1]) for at in range(len(values))]


def main() -> None:
    """Compare all runs that have reached the last iteration."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("runs", type=Path)
    words.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    words.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    words.add_argument("--task-lists", nargs="+", default=[OWN], help="names of task lists, as in score.py")
    words.add_argument("--iterations", type=int, default=60, help="compare the policies after so many")
    words.add_argument("--out", type=Path, help="write the numbers here as JSON")
    words.add_argument("--figure", type=Path, help="draw the curves here as SVG")
    args = words.parse_args()
    rows: dict[str, Any] = {}
    for method in args.methods:
        curves = {seed: evaluations(args.runs, method, seed, args.iterations) for seed in args.seeds}
        there = {seed: curve for seed, curve in curves.items() if curve and curve[-1][0] == args.iterations}
        if there:
            rows[method] = {
                **compare(
                    {seed: ends(args.runs, args.task_lists, method, seed, there[seed]) for seed in there}
                ),
                "curves": {
                    seed: [[number, mean(each.values())] for number, each in curve]
                    for seed, curve in there.items()
                },
                "explored": {seed: explored(args.runs, method, seed, args.iterations) for seed in there},
            }
    print("\n".join([HEAD, "|---" * (HEAD.count("|") - 1) + "|", *(row(*each) for each in rows.items())]))
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    if args.figure and rows:
        draw(rows, args.figure)


if __name__ == "__main__":
    main()
