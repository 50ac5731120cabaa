r"""Run the demo with several seeds, and also score its policies with greedy decoding.

    python benchmarks/demo.py --seeds 0 1 2 --output runs --out benchmarks/demo.json

The runs are in `runs/demo-0`, `runs/demo-0-then` and so on. A second call resumes the first. A finished run is only
read.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

GREEDY = ["evaluate.sampling={temperature: 0.0, max_new_tokens: 16}", "evaluate.concurrency=128"]


def perturn(*words: str) -> str:
    """Run a command of Perturn, and return its output. Raise an error if the command fails."""
    return subprocess.run(
        [sys.executable, "-m", "perturn", *words], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def read(run: Path) -> dict[str, Any]:
    """Return the summary of a run."""
    found: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return found


def half(run: Path) -> dict[str, Any]:
    """Return one half of the demo: success before and after with intervals, and the difference paired by game."""
    summary = read(run)
    before, after = summary["policies"][0], summary["policies"][-1]
    found = summary["comparison"]
    return {
        "n": after["n"],
        "before": [before["mean_score"], *before["interval"]],
        "after": [after["mean_score"], *after["interval"]],
        "invalid": [before["invalid_rate"], after["invalid_rate"]],
        "difference": [found["mean_difference"], *found["interval"]],
        "won_lost": [found["wins"], found["losses"]],
    }


def greedy(first: Path, output: Path, policies: dict[str, str]) -> dict[str, float]:
    """Return the greedy success of some policies on the games of the demo."""
    recipe = read(first)["protocol"]
    scored = {}
    for name, model in policies.items():
        run = f"{first.name}-greedy-{name}"
        words = [
            "--model",
            model,
            "--environment",
            "alfworld-like",
            "--split",
            recipe["split"],
            "--n",
            str(recipe["n"]),
        ]
        words += [
            f"environment.{key}={json.dumps(recipe['settings'][key])}"
            for key in recipe["settings"]
            if key != "name"
        ]
        said = perturn(
            "evaluate", *words, "--json", "protocol.max_turns=20", f"name={run}", f"output={output}", *GREEDY
        )
        scored[name] = json.loads(said)["policies"][0]["mean_score"]
    return scored


def main() -> None:
    """Run the missing runs, print a table, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--name", default="demo-{}", help="Name of a seed's run.")
    parser.add_argument("--output", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()

    found: dict[str, Any] = {"seeds": {}}
    for seed in asked.seeds:
        first = asked.output / asked.name.format(seed)
        then = first.with_name(f"{first.name}-then")
        if not (then / "summary.json").is_file():
            perturn("run", "demo", f"seed={seed}", f"name={first.name}", f"output={asked.output}")
        last = max((first / "checkpoints").glob("ppo-clip-*"))
        policies = {"start": "tiny-agent", "online": str(last)}
        found["seeds"][seed] = {
            "online": half(first),
            "tlm-dre": half(then),
            "greedy": greedy(first, asked.output, policies),
        }
        for name in ("online", "tlm-dre"):
            one = found["seeds"][seed][name]
            values = " ".join(f"{value:+.3f}" for value in one["difference"])
            print(f"seed {seed} {name}: {one['before'][0]:.3f} -> {one['after'][0]:.3f}, {values}")
    asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
