r"""Compare one training step in TRL's DPOTrainer and in TurnTrainer: time, memory, and agreement of the losses.

    python benchmarks/training.py            the full table (about an hour on two cores)
    python benchmarks/training.py --quick    three cases of two pairs a step, within five minutes
    python benchmarks/training.py --device cuda    on a GPU, with larger models and more pairs
    python benchmarks/training.py --json     rows for machines

Both trainers get the same model, token ids and DPO loss. Each runs in its own process, and their steps alternate. A
ratio is the peer's time over TurnTrainer's, as the median over paired steps, so larger is better. Peak memory is over
all steps, without the memory of the libraries before the model is created. TRL runs at its defaults except for
`max_length`, which would cut the episodes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from training_data import Shape, make_pairs
from training_models import threads
from training_sides import SIDES, achieved_flops, matmul_ceiling, now
from worker import Worker, held, peak


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
    ours: dict[str, Any] = field(default_factory=dict)
    """Settings of `TurnConfig` other than its defaults."""
    quick: bool = False
    device: str = "cpu"


ONE_SHOT = Shape(one_shot=0.6)
WIDE = {"activation_checkpointing": True, "token_budget": 10_240}
"""Settings for larger passes, in which more pairs share a worked example."""

CASES = [
    Case("completion", "5M", 8_192, quick=True),
    Case("completion", "15M", 8_192),
    Case("completion", "15M", 49_152),
    Case("assistant", "15M", 49_152, loss_tokens="assistant"),
    Case("assistant", "15M", 49_152, loss_tokens="assistant", dtype="bfloat16", quick=True),
    Case("one-shot", "15M", 49_152, loss_tokens="assistant", shape=ONE_SHOT, steps=2),
    Case("one-shot", "15M", 49_152, loss_tokens="assistant", shape=ONE_SHOT, steps=2, ours=WIDE),
    Case("assistant", "135M", 49_152, loss_tokens="assistant", dtype="bfloat16", pairs=2),
    Case("assistant", "135M", 49_152, loss_tokens="assistant", dtype="bfloat16", pairs=2, ours=WIDE),
]
CASES += [
    Case("tuned peer", "15M", 49_152, loss_tokens="assistant", dtype="bfloat16", peer="trl-tuned", quick=True)
]

ON_GPU = [
    Case(
        "assistant",
        size,
        49_152,
        loss_tokens="assistant",
        dtype="bfloat16",
        peer=peer,
        pairs=16,
        steps=5,
        ours={"token_budget": 16_384},
        device="cuda",
    )
    for size in ("135M", "1B")
    for peer in ("trl", "trl-tuned")
]
AGAIN = {"token_budget": 16_384, "activation_checkpointing": True}
"""Settings that recompute activations in the backward pass, as TRL's defaults do."""
ON_GPU += [replace(case, ours=AGAIN) for case in ON_GPU if case.peer == "trl"]


def compare(case: Case) -> dict[str, Any]:
    """Run both trainers in alternation, step by step. The first step of each is a warm-up."""
    with _worker(case, case.peer) as peer, _worker(case, "perturn") as ours:
        before = [side.ask("reference") / (case.steps + 1) for side in (peer, ours)]
        steps = [(peer.ask("step"), ours.ask("step")) for _ in range(case.steps + 1)][1:]
        memory = [side.ask("peak") for side in (peer, ours)]
        flops, ceiling = ours.ask("flops")[1:], ours.ask("ceiling")
    times = [median(each["seconds"] for each in side) for side in zip(*steps, strict=True)]
    ratios = [theirs["seconds"] / mine["seconds"] for theirs, mine in steps]
    tokens = median(mine["tokens"] for _, mine in steps)
    speed = median(flop / mine["seconds"] for flop, (_, mine) in zip(flops, steps, strict=True))
    return {
        "case": case.case,
        "size": case.size,
        "vocab": case.vocab,
        "loss": "dpo",
        "dtype": case.dtype,
        "step_ratio": round(median(ratios), 2),
        "memory_ratio": round(memory[0] / memory[1], 2),
        "loss_gap": None
        if _differs(case)
        else max(abs(theirs["loss"] - mine["loss"]) for theirs, mine in steps),
        # A step's share of the computation before training. TRL's defaults compute the reference within the step.
        "step_ratio_with_reference": round((times[0] + before[0]) / (times[1] + before[1]), 2),
        "peer": case.peer,
        "settings": case.ours,
        "peer_seconds": round(times[0], 3),
        "seconds": round(times[1], 3),
        "peer_gigabytes": round(memory[0] / 1e9, 2),
        "gigabytes": round(memory[1] / 1e9, 2),
        "tokens": int(tokens),
        "tokens_per_second": round(tokens / times[1]),
        "gflops": round(speed / 1e9, 1),
        "ceiling_gflops": round(ceiling / 1e9, 1),
        "utilization": round(speed / ceiling, 2),
        "steps": case.steps,
        "threads": threads(),
    }


def _worker(case: Case, side: str) -> Worker:
    return Worker(__file__, {**asdict(case), "side": side})


def _differs(case: Case) -> bool:
    """Return whether the peer's loss covers other tokens than TurnTrainer's."""
    return case.loss_tokens == "assistant" and case.peer != "trl-tuned"


def work(settings: dict[str, Any]) -> None:
    """Answer requests line by line in this process."""
    side = SIDES[settings.pop("side")]
    case = Case(**{**settings, "shape": Shape(**settings["shape"])})
    batches = make_pairs(case.shape, case.vocab, case.pairs, case.steps + 1, case.loss_tokens)
    left = iter(batches)
    before = held() if case.device == "cpu" else 0
    settings_of_ours = case.ours if side is SIDES["perturn"] else {}
    trainer = side(case.size, case.vocab, case.dtype, case.loss_tokens, case.device, **settings_of_ours)

    def step() -> dict[str, float]:
        inputs = trainer.collate(next(left))
        start = now(case.device)
        loss = trainer.step(inputs)
        return {"seconds": now(case.device) - start, "loss": loss, "tokens": trainer.tokens(inputs)}

    def reference() -> float:
        if case.device == "cuda":
            trainer.take_reference(batches[0])  # compiles kernels
        trainer.take_reference([pair for batch in batches for pair in batch])
        return float(trainer.reference_seconds)

    answers: dict[str, Callable[[], Any]] = {
        "reference": reference,
        "step": step,
        "flops": lambda: [achieved_flops(case.size, case.vocab, trainer.collate(batch)) for batch in batches],
        "ceiling": lambda: matmul_ceiling(
            case.size, case.dtype, trainer.tokens(trainer.collate(batches[-1])), case.device
        ),
        "peak": lambda: peak(case.device) - before,
    }
    for line in sys.stdin:
        print(json.dumps(answers[line.strip()]()), flush=True)


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
    """Return the rows as a Markdown table."""
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        cells = [
            f"{row[key]:.1e}" if key == "loss_gap" and row[key] is not None else row[key] for key in COLUMNS
        ]
        lines.append("| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Parse the options, measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="three cases of two pairs a step, within five minutes"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", action="store_true", help="print a list of rows instead of a table")
    parser.add_argument("--only", help="cases whose 'name size vocabulary dtype peer.' contains this")
    parser.add_argument("--out", type=Path, help="write the rows here, too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return
    rows = []
    for case in CASES if options.device == "cpu" else ON_GPU:
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
