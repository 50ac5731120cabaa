"""Compare the peak memory of CPU training with the estimate of `perturn.estimate.memory.training_memory`.

    python benchmarks/memory.py --out benchmarks/memory.json
    python benchmarks/memory.py --predict        the formula alone, for models of 0.5B, 7B and 70B parameters on GPUs

Llamas of random weights are trained for two steps of AdamW, each case in separate processes. The measured value is the
peak resident memory of a process in training, minus its memory before the model was loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import weakref
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from free_port import free_port
from training_models import llama

from perturn.free_memory import release_memory

SMALLEST = "0.1M"
SIZES = {  # hidden, layers, feed-forward, heads, key heads, vocabulary
    SMALLEST: (64, 2, 128, 4, 4, 512),
    "5M": (256, 6, 688, 4, 4, 8192),
    "15M": (384, 8, 1024, 6, 6, 8192),
    "135M": (576, 30, 1536, 9, 3, 49152),
}
PREDICTED = {  # parameters, vocabulary, hidden, layers, feed-forward, query, key, heads, tied
    "0.5B": (494_032_768, 151_936, 896, 24, 4864, 896, 128, 14, True),
    "7B": (7_615_616_512, 152_064, 3584, 28, 18_944, 3584, 512, 28, False),
    "70B": (70_553_706_496, 128_256, 8192, 80, 28_672, 8192, 1024, 64, False),
}
"""Sizes of Qwen2.5-0.5B, Qwen2.5-7B and Llama-3.1-70B."""
WAYS: list[tuple[str, int, bool, int]] = [
    ("all weights", 0, False, 1),
    ("all weights, checkpointing", 0, True, 1),
    ("rank 16, checkpointing", 16, True, 1),
    ("all weights, checkpointing, fsdp2", 0, True, 8),
    ("rank 16, checkpointing, fsdp2", 16, True, 8),
]
"""Trainings that `--predict` shows: words, rank of adapters, activation checkpointing, processes."""
PROMPT, ANSWER = 20, 10
"""Number of times that a conversation's prompt and answer say `take mug 2 .`, which is four words."""


@dataclass(frozen=True)
class Case:
    """One training."""

    size: str
    rows: int
    """Number of conversations in an optimizer step."""
    passes: int = 1
    """Number of passes in an optimizer step, each with the same number of rows."""
    rank: int = 0
    """Rank of adapters; 0 to train all weights."""
    checkpointing: bool = False
    bfloat16: bool = False
    processes: int = 1
    sharding: str = "none"


CASES = [
    Case("5M", 8),
    Case("5M", 8, checkpointing=True),
    Case("5M", 8, passes=4),
    Case("5M", 8, rank=16),
    Case("5M", 8, rank=16, checkpointing=True),
    Case("5M", 8, bfloat16=True),
    Case("5M", 8, bfloat16=True, checkpointing=True),
    Case("5M", 8, bfloat16=True, rank=16),
    Case("5M", 8, bfloat16=True, processes=2, sharding="fsdp2"),
    Case("5M", 8, bfloat16=True, processes=2, sharding="fsdp2", checkpointing=True),
    Case("15M", 8),
    Case("15M", 8, checkpointing=True),
    Case("15M", 8, passes=2),
    Case("15M", 8, rank=16),
    Case("15M", 8, rank=16, checkpointing=True),
    Case("135M", 2),
    Case("135M", 2, passes=2),
    Case("135M", 2, checkpointing=True),
    Case("135M", 2, rank=16),
    Case("135M", 2, rank=16, checkpointing=True),
    Case("135M", 2, processes=2),
    Case("135M", 2, processes=2, sharding="fsdp2"),
    Case("135M", 2, processes=2, sharding="fsdp2", checkpointing=True),
    Case("135M", 2, processes=2, sharding="fsdp2", rank=16),
    Case("135M", 4, processes=4, sharding="fsdp2"),
]


def said(start: int, times: int) -> str:
    """Return a text that repeats four words a number of times."""
    return " ".join(f"take mug {(start + each) % 50} ." for each in range(times))


def conversations(rows: int) -> list[dict[str, Any]]:
    """Return conversations without a common beginning."""
    return [
        {
            "messages": [
                {"role": "user", "content": said(n, PROMPT)},
                {"role": "assistant", "content": said(n, ANSWER)},
            ]
        }
        for n in range(rows)
    ]


def begin(folder: Path, size: str) -> None:
    """Write the initial policy of a training."""
    from perturn.chat.word_tokenizer import make_tokenizer

    told = [message["content"] for row in conversations(50) for message in row["messages"]]
    tokenizer = make_tokenizer(told, 4096)
    *shape, vocabulary = SIZES[size]
    tokens = {
        "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    llama(shape, vocabulary, max_position_embeddings=4096, **tokens).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def resident(field: str) -> int:
    """Return resident memory in bytes: the peak for `VmHWM`, the current value for `VmRSS`."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


def settings(folder: Path, case: Case, row: int) -> Any:
    """Return the settings of a training on conversations of `row` tokens."""
    from perturn import TurnConfig
    from perturn.training.sharding import fsdp2

    each = case.rows // case.processes
    return TurnConfig(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=case.bfloat16,
        report_to=[],
        disable_tqdm=True,
        loss="sft",
        token_budget=row * each // case.passes,
        activation_checkpointing=case.checkpointing,
        per_device_train_batch_size=each,
        max_steps=2,
        save_strategy="no",
        **(fsdp2(False) if case.sharding == "fsdp2" else {}),
    )


def train(folder: Path, case: Case) -> tuple[Any, int]:
    """Train. Return the sizes of the model, and the number of tokens in a conversation."""
    from perturn.backends.local_training import LocalTraining
    from perturn.config.sections import Lora
    from perturn.estimate.memory import model_shape

    training, lora = LocalTraining(), Lora(rank=case.rank) if case.rank else None
    data = conversations(case.rows)
    model, tokenizer = training.begin(str(folder / case.size), [], 0, lora, False)
    row = len(tokenizer.apply_chat_template(data[0]["messages"])["input_ids"])
    shape, args = model_shape(model), settings(folder, case, row)
    trainer = training.trainer(model, None, lora, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return shape, row


def tensor_watch() -> Any:
    """Return a context that counts the bytes of the tensors created in it, as `now` and `most`."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watch(TorchDispatchMode):
        now = most = 0

        def __init__(self) -> None:
            super().__init__()
            self._known: set[int] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            for each in tree_leaves(made):
                if isinstance(each, torch.Tensor):
                    self._count(getattr(each, "_local_tensor", each))
            return made

        def _count(self, tensor: torch.Tensor) -> None:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, key, size)

        def _gone(self, key: int, size: int) -> None:
            self._known.discard(key)
            self.now -= size

    return Watch()


def work(folder: Path, case: Case) -> None:
    """Train in one of the processes, and write the measurements."""
    from perturn.estimate.memory import training_memory

    rank, each = int(os.environ.get("RANK", 0)), case.rows // case.processes
    train(folder, replace(case, size=SMALLEST, rows=case.processes * case.passes))  # does all imports
    release_memory()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak resident memory
    before = resident("VmRSS")
    with nullcontext() if case.processes > 1 else tensor_watch() as watch:
        shape, row = train(folder, case)
    formula = training_memory(
        shape,
        tokens=row * each // case.passes,
        loss_tokens=(4 * ANSWER + 1) * each // case.passes,
        compute_bytes=2 if case.bfloat16 else 4,
        device="cpu",
        adapters=shape.adapters(case.rank) if case.rank else 0,
        checkpointing=case.checkpointing,
        processes=case.processes,
        sharding=case.sharding,
        passes=case.passes,
        reads_reference=False,
    )
    found = {
        "parameters": shape.parameters,
        "tokens_a_pass": row * each // case.passes,
        "before": before,
        "held": resident("VmHWM") - before,
        "used": watch.most if watch is not None else None,
        "formula": formula.to_dict(),
    }
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort the interpreter at exit


def measure(folder: Path, case: Case) -> dict[str, Any]:
    """Train in fresh processes. Return the case, the measurements of the largest process, and the estimate."""
    from perturn.run.launch.driver import FREED

    for size in (SMALLEST, case.size):
        if not (folder / size).is_dir():
            begin(folder / size, size)
    port = str(free_port())
    common = os.environ | {"OMP_NUM_THREADS": "1", "PERTURN_CACHE": str(folder / "cache")}
    own: list[dict[str, str]] = [{}]
    if case.processes > 1:
        common |= FREED if case.sharding == "fsdp2" else {}  # as in the driver of a run
        common |= {"WORLD_SIZE": str(case.processes), "LOCAL_WORLD_SIZE": str(case.processes)}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(case.processes)]
    command = [sys.executable, __file__, "--work", str(folder), "--case", json.dumps(asdict(case))]
    processes = [subprocess.Popen(command, env=common | each) for each in own]
    codes = [each.wait() for each in processes]
    if any(codes):
        raise SystemExit(f"a process of {case} failed")
    ranks = [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(case.processes)]
    return {**asdict(case), **max(ranks, key=lambda each: float(each["held"]))}


def show(row: dict[str, Any]) -> str:
    """Return a line of the table."""
    how = f"rank {row['rank']}" if row["rank"] else "all weights"
    how += ", checkpointing" * row["checkpointing"] + (", bfloat16" if row["bfloat16"] else ", float32")
    where = f"{row['processes']} x {row['sharding']}" if row["processes"] > 1 else "1"
    gb = {name: row[name] and f"{row[name] / 1e9:.3f}" for name in ("used", "held")}
    ratios = [row[name] and f"{row['formula']['peak'] / row[name]:.2f}" for name in ("used", "held")]
    return (
        f"| {row['size']} | {how} | {where} | {row['passes']} | {row['formula']['peak'] / 1e9:.3f} | {gb['used']} | "
        f"{ratios[0]} | {gb['held']} | {ratios[1]} |"
    )


def predictions() -> list[dict[str, Any]]:
    """Return the gigabytes of DPO in bfloat16 on GPUs by formula: 8192 tokens in a pass, and loss on 30 % of them."""
    from perturn.estimate.memory import ModelShape, training_memory

    rows = []
    for size, numbers in PREDICTED.items():
        shape = ModelShape(*numbers)
        for words, rank, checkpointing, processes in WAYS:
            found = training_memory(
                shape,
                tokens=8192,
                loss_tokens=2458,
                adapters=shape.adapters(rank) if rank else 0,
                checkpointing=checkpointing,
                processes=processes,
                sharding="fsdp2" if processes > 1 else "none",
            )
            rows.append(
                {"size": size, "training": words, "processes": processes, "gb": round(found.peak / 1e9, 1)}
            )
    return rows


def main() -> None:
    """Measure, print, and write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--predict", action="store_true", help="print the formula for large models alone")
    parser.add_argument("--only", help="cases whose description contains this")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.work, Case(**json.loads(options.case)))
    if options.predict:
        for row in predictions():
            print("| " + " | ".join(str(each) for each in row.values()) + " |")
        return
    rows = []
    print(
        "| size | training | processes | passes | formula GB | used GB | formula / used | held GB | formula / held |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        for case in CASES:
            if options.only is None or options.only in str(case):
                rows.append(measure(Path(place), case))
                print(show(rows[-1]), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
