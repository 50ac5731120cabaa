r"""Compare a training step on groups of episodes in TRL's GRPOTrainer and in TurnTrainer: time, memory, losses.

    python benchmarks/groups.py                            the table, on the CPU
    python benchmarks/groups.py --device cuda              the same on a GPU, in bfloat16, with larger models
    python benchmarks/groups.py --quick                    one small case, within a minute
    python benchmarks/groups.py --only '135M' --json       some rows, for machines

Both trainers get the same model, token ids, rewards and loss (clipped policy gradient, averaged over the step's
tokens). Each trainer runs its own `train` in its own process, and their steps alternate. A ratio is the peer's time
over TurnTrainer's, as the median over paired steps, so larger is better. Every prompt begins with the same worked
example, and the samples of a task share their prompt. Peak memory is over all steps, without the memory of the
libraries before the model is created. On a GPU it is the memory of tensors. TRL runs at its defaults, with 8 episodes
per pass and activation checkpointing.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from groups_sides import TRL_BATCH, work
from training_data import Episode, Shape, make_groups
from training_models import threads
from worker import Worker


@dataclass(frozen=True)
class Case:
    """One comparison."""

    size: str
    vocab: int
    samples: int
    dtype: str = "float32"
    worked: int = 600
    """Number of tokens of the worked example."""
    steps: int = 3
    ours: dict[str, Any] = field(default_factory=dict)
    """Settings of `TurnConfig` other than its defaults."""
    device: str = "cpu"

    @property
    def name(self) -> str:
        """Name of the case, which `--only` searches."""
        return (
            f"{self.size} {self.vocab} {self.dtype} group of {self.samples}, {self.worked} {self.ours or ''}."
        )

    def episodes(self) -> list[list[Episode]]:
        """Return the episodes of each step, and of one warm-up step. A step has at least as many as a pass of TRL's."""
        tasks = max(1, TRL_BATCH // self.samples)
        return make_groups(Shape(), self.vocab, self.worked, tasks, self.samples, self.steps + 1)


QUICK = Case("0.9M", 1_024, 8, worked=100, steps=1)

NARROW = {"activation_checkpointing": True, "token_budget": 1024}
"""Settings for passes of one episode after the common prefix, with activation checkpointing."""

CASES = [
    Case("15M", 49_152, 8),
    Case("15M", 49_152, 8, dtype="bfloat16"),
    Case("15M", 49_152, 4),
    Case("15M", 49_152, 16, steps=2),
    Case("15M", 8_192, 8),
    Case("135M", 49_152, 8, dtype="bfloat16", steps=2),
    Case("135M", 49_152, 8, dtype="bfloat16", steps=1, ours=NARROW),
]

ON_GPU = [
    Case(size, 49_152, samples, dtype="bfloat16", device="cuda", ours={"token_budget": 16_384})
    for size in ("135M", "360M")
    for samples in (4, 8, 16)
]


def compare(case: Case) -> dict[str, Any]:
    """Run both trainers in alternation, step by step. The first step of each is a warm-up."""
    with _worker(case, "trl") as peer, _worker(case, "perturn") as ours:
        steps = [(peer.ask("step"), ours.ask("step")) for _ in range(case.steps + 1)][1:]
        memory = [side.ask("peak") for side in (peer, ours)]
        about = {name: ours.ask(name) for name in ("tokens", "flops")}
        about["ceiling"] = ours.ask("ceiling") if case.device == "cpu" else None
    times = [median(each["seconds"] for each in side) for side in zip(*steps, strict=True)]
    ratios = [theirs["seconds"] / mine["seconds"] for theirs, mine in steps]
    speed = about["flops"] / times[1]
    return {
        **asdict(case),
        "step_ratio": round(median(ratios), 2),
        "memory_ratio": round(memory[0] / memory[1], 2),
        "peer_seconds": round(times[0], 3),
        "seconds": round(times[1], 3),
        "peer_gigabytes": round(memory[0] / 1e9, 2),
        "gigabytes": round(memory[1] / 1e9, 2),
        "loss_gap": max(abs(theirs["loss"] - mine["loss"]) for theirs, mine in steps),
        "norm_gap": max(abs(theirs["norm"] / mine["norm"] - 1) for theirs, mine in steps),
        "tokens": about["tokens"],
        "gflops": round(speed / 1e9, 1),
        "utilization": about["ceiling"] and round(speed / about["ceiling"], 2),
        "threads": threads(),
    }


def _worker(case: Case, side: str) -> Worker:
    return Worker(__file__, {**asdict(case), "side": side})


COLUMNS = {
    "size": "size",
    "vocab": "vocabulary",
    "dtype": "dtype",
    "samples": "group",
    "worked": "worked example",
    "ours": "our settings",
    "peer_seconds": "TRL s",
    "seconds": "ours s",
    "step_ratio": "time ×",
    "peer_gigabytes": "TRL GB",
    "gigabytes": "ours GB",
    "memory_ratio": "memory ×",
    "utilization": "of matmul ceiling",
    "loss_gap": "loss gap",
    "norm_gap": "gradient norm gap",
}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        cells = [f"{row[key]:.1e}" if key.endswith("_gap") else row[key] or "" for key in COLUMNS]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Parse the options, measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="one small case, within a minute")
    parser.add_argument(
        "--only", default="", help="cases whose name contains this, such as '15M 49152 float32'"
    )
    parser.add_argument("--steps", type=int, help="steps that count, instead of each case's own")
    parser.add_argument("--json", action="store_true", help="print a list of rows instead of a table")
    parser.add_argument("--out", type=Path, help="write the rows here, too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        settings = json.loads(options.worker)
        side = settings.pop("side")
        work(settings, side, Case(**settings).episodes())
        return
    rows = []
    cases = CASES if options.device == "cpu" else ON_GPU
    for case in [replace(QUICK, device=options.device)] if options.quick else cases:
        if options.only in case.name:
            rows.append(compare(replace(case, steps=options.steps) if options.steps else case))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if options.out:
                options.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(rows, indent=1) if options.json else table(rows))


if __name__ == "__main__":
    main()
