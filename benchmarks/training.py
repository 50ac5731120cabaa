r"""One training step through TRL's DPOTrainer and through TurnTrainer: time, memory, and whether the losses agree.

    python benchmarks/training.py            the full table (about an hour on two cores)
    python benchmarks/training.py --quick    three cases of two pairs a step, within five minutes
    python benchmarks/training.py --json     rows for machines

Both trainers get the same model, token ids and DPO loss; steps alternate, and a ratio is the median over paired steps
(peer over ours: larger is better). Peak memory is that of a fresh process for each trainer, less what the libraries
take before the model is made. TRL runs at its defaults but for `max_length`, which would cut the episodes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from training_data import Shape, make_pairs
from training_sides import SIDES, achieved_flops, matmul_ceiling, threads

from turnwise.memory import release_memory


@dataclass(frozen=True)
class Case:
    """One comparison."""

    case: str
    size: str
    vocab: int
    dtype: str = "float32"
    peer: str = "trl"
    loss_tokens: str = "completion"
    shape: Shape = field(default_factory=Shape)
    pairs: int = 3
    steps: int = 3
    quick: bool = False


ONE_SHOT = Shape(one_shot=0.6)

CASES = [
    Case("completion", "5M", 8_192, quick=True),
    Case("completion", "15M", 8_192),
    Case("completion", "15M", 49_152),
    Case("assistant", "15M", 49_152, loss_tokens="assistant"),
    Case("assistant", "15M", 49_152, loss_tokens="assistant", dtype="bfloat16", quick=True),
    Case("one-shot", "15M", 49_152, loss_tokens="assistant", shape=ONE_SHOT),
    Case("assistant", "135M", 49_152, loss_tokens="assistant", dtype="bfloat16", pairs=2),
]
CASES += [replace(case, peer="trl-no-checkpointing", quick=False) for case in CASES]
CASES += [
    Case("tuned peer", "15M", 49_152, loss_tokens="assistant", dtype="bfloat16", peer="trl-tuned", quick=True)
]


def compare(case: Case) -> dict[str, Any]:
    """Run both trainers step by step, taking turns; the first step of each is not counted."""
    batches = make_pairs(case.shape, case.vocab, case.pairs, case.steps + 1, case.loss_tokens)
    peer, ours = (
        SIDES[name](case.size, case.vocab, case.dtype, case.loss_tokens) for name in (case.peer, "turnwise")
    )
    for side in (peer, ours):
        side.take_reference([pair for batch in batches for pair in batch])
    ratios, gaps, tokens, seconds = [], [], [], []
    for number, batch in enumerate(batches):
        ready = peer.collate(batch), ours.collate(batch)
        start = time.perf_counter()
        theirs = peer.step(ready[0])
        middle = time.perf_counter()
        mine = ours.step(ready[1])
        end = time.perf_counter()
        if number:
            ratios.append((middle - start) / (end - middle))
            seconds.append((middle - start, end - middle))
            tokens.append(ours.tokens(ready[1]))
            gaps.append(abs(theirs - mine))
    ceiling = matmul_ceiling(case.size, case.dtype, tokens[-1])
    work = [achieved_flops(case.size, case.vocab, ours.collate(batch)) for batch in batches[1:]]
    # A step's share of what each side computed before training; TRL's defaults compute it in the step.
    before = [side.reference_seconds / len(batches) for side in (peer, ours)]
    del peer, ours  # the processes that measure memory need it
    release_memory()
    times = [median(one) for one in zip(*seconds, strict=True)]
    return {
        "case": case.case,
        "size": case.size,
        "vocab": case.vocab,
        "loss": "dpo",
        "dtype": case.dtype,
        "step_ratio": round(median(ratios), 2),
        "memory_ratio": round(peak(case, case.peer) / peak(case, "turnwise"), 2),
        "loss_gap": None if _differs(case) else max(gaps),
        "step_ratio_with_reference": round((times[0] + before[0]) / (times[1] + before[1]), 2),
        "peer": case.peer,
        "peer_seconds": round(times[0], 3),
        "seconds": round(times[1], 3),
        "tokens": int(median(tokens)),
        "tokens_per_second": round(median(tokens) / times[1]),
        "gflops": round(median(w / s for w, (_, s) in zip(work, seconds, strict=True)) / 1e9, 1),
        "ceiling_gflops": round(ceiling / 1e9, 1),
        "utilization": round(median(w / s for w, (_, s) in zip(work, seconds, strict=True)) / ceiling, 2),
        "steps": case.steps,
        "threads": threads(),
    }


def _differs(case: Case) -> bool:
    """Whether the peer sums over other tokens than we do."""
    return case.loss_tokens == "assistant" and case.peer != "trl-tuned"


def peak(case: Case, side: str) -> float:
    """Peak memory in bytes of one step of one trainer in a process of its own."""
    settings = json.dumps({**asdict(case), "side": side})
    command = [sys.executable, __file__, "--peak", settings]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def measure_peak(settings: dict[str, Any]) -> int:
    """In the process of its own: one step, then the most that was resident, less what was before the model."""
    side = SIDES[settings.pop("side")]
    case = Case(**{**settings, "shape": Shape(**settings["shape"])})
    batches = make_pairs(case.shape, case.vocab, case.pairs, 1, case.loss_tokens)
    before = _status("VmRSS")
    trainer = side(case.size, case.vocab, case.dtype, case.loss_tokens)
    trainer.take_reference([pair for batch in batches for pair in batch])
    for batch in batches:
        trainer.step(trainer.collate(batch))
    return _status("VmHWM") - before


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {name}; memory is measured on Linux only")


COLUMNS = {
    "case": "case",
    "peer": "peer",
    "size": "size",
    "vocab": "vocabulary",
    "dtype": "dtype",
    "peer_seconds": "peer s",
    "seconds": "ours s",
    "step_ratio": "time ×",
    "step_ratio_with_reference": "time × (reference counted)",
    "memory_ratio": "memory ×",
    "utilization": "of matmul ceiling",
    "loss_gap": "loss gap",
}


def table(rows: list[dict[str, Any]]) -> str:
    """Rows for people, in Markdown."""
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        cells = [
            f"{row[key]:.1e}" if key == "loss_gap" and row[key] is not None else row[key] for key in COLUMNS
        ]
        lines.append("| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="three cases of two pairs a step, within five minutes"
    )
    parser.add_argument("--json", action="store_true", help="print a list of rows instead of a table")
    parser.add_argument("--only", help="cases whose 'name size vocabulary dtype peer.' contains this")
    parser.add_argument("--out", type=Path, help="write the rows here, too")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(measure_peak(json.loads(options.peak)))
        return
    rows = []
    for case in CASES:
        if (
            options.only
            and options.only not in f"{case.case} {case.size} {case.vocab} {case.dtype} {case.peer}."
        ):
            continue
        if options.quick and not case.quick:
            continue
        rows.append(compare(replace(case, pairs=2, steps=2) if options.quick else case))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(rows, indent=1) if options.json else table(rows))


if __name__ == "__main__":
    main()
