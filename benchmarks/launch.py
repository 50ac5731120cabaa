"""Compare FSDP2 on several CPU processes with one process: gradients, and peak memory of each process.

    python benchmarks/launch.py --worlds 1 2 --out benchmarks/launch.json

A Llama of random weights is trained for two steps of AdamW on four conversations, in float32, by 1, 2 and 4 processes
with gloo. Memory is the peak resident memory of each process while it trains and saves the policy, with and without the
memory of its imports. Gradients are compared at the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from free_port import free_port

WORLDS = (1, 2, 4)


def rows() -> list[dict[str, Any]]:
    """Return conversations of different lengths."""
    return [
        {
            "messages": [
                {"role": "user", "content": "take mug 2 . " * (1 + n)},
                {"role": "assistant", "content": "take mug 2 . " * (1 + 2 * n)},
            ]
        }
        for n in range(4)
    ]


def begin(folder: Path, hidden: int, layers: int) -> int:
    """Write the initial policy. Return the number of its parameters."""
    import torch

    from perturn.chat.word_tokenizer import make_tokenizer
    from perturn.config.sections import Shape
    from perturn.policy.models import new_model

    said = [message["content"] for row in rows() for message in row["messages"]]
    tokenizer = make_tokenizer(said, 512)
    shape = Shape(hidden=hidden, layers=layers, heads=8, mlp=3 * hidden, context=512)
    torch.manual_seed(0)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = new_model(shape, len(tokenizer), **ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(each.numel() for each in model.parameters())


def peak() -> float:
    """Return the peak memory of this process, in GB."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e9


def comparing(folder: Path, world: int, rank: int, seen: list[float]) -> Any:
    """Return a callback that compares the first step's gradients with the gradients of a single process.

    Args:
        folder: Folder of the recorded gradients.
        world: Number of processes.
        rank: Rank of this process. The first process compares.
        seen: List to which the largest difference of each weight is appended.
    """
    import torch
    from transformers import TrainerCallback

    class Compare(TrainerCallback):
        def on_pre_optimizer_step(
            self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
        ) -> None:
            for number, weight in enumerate([] if state.global_step else model.parameters()):
                file = folder / f"gradient-{number}.pt"
                whole = weight.grad if world == 1 else weight.grad.full_tensor()
                if world == 1:
                    torch.save(whole, file)
                elif rank == 0:
                    seen.append(float((whole - torch.load(file, weights_only=True)).abs().max()))

    return Compare()


def work(folder: Path) -> None:
    """Train and save in one of the processes, and print the measurements."""
    from perturn import TurnConfig
    from perturn.backends.local_training import LocalTraining
    from perturn.training.sharding import fsdp2
    from perturn.training.turn_trainer import TurnTrainer  # noqa: F401  its imports are counted as such

    world, rank, imports = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0)), peak()
    seen: list[float] = []
    args = TurnConfig(
        output_dir=str(folder / f"out-{world}"),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        loss="sft",
        per_device_train_batch_size=4 // world,
        max_steps=2,
        save_strategy="no",
        logging_steps=1,
        max_grad_norm=0.0,
        **(fsdp2(False) if world > 1 else {}),
    )
    training = LocalTraining()
    model, tokenizer = training.begin(str(folder / "policy"), [], 0, None, False)
    settings = {
        "args": args,
        "train_dataset": rows(),
        "processing_class": tokenizer,
        "callbacks": [comparing(folder, world, rank, seen)],
    }
    trainer = training.trainer(model, None, None, **settings)
    trainer.train()
    trained = peak()
    if rank == 0 or world > 1:
        training.save(trainer, folder / f"saved-{world}", with_optimizer=False, merged=True)
    found = {
        "rank": rank,
        "imports_gb": imports,
        "trained_gb": trained,
        "saved_gb": peak(),
        "difference": max(seen, default=0.0),
    }
    (folder / f"found-{world}-{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort the interpreter at exit


def measure(folder: Path, world: int) -> dict[str, Any]:
    """Train with several processes, each with its own memory."""
    from perturn.run.launch.driver import FREED

    port = str(free_port())
    common = os.environ | {"OMP_NUM_THREADS": "1", "PERTURN_CACHE": str(folder / "cache")}
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    if world == 1:
        own = [{}]  # without a process group
    else:
        common |= FREED  # as in the driver of a run
        common |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, __file__, "--work", str(folder)]
    processes = [subprocess.Popen(command, env=common | each) for each in own]
    if any(each.wait() for each in processes):
        raise SystemExit("a process failed")
    ranks = [json.loads((folder / f"found-{world}-{rank}.json").read_text()) for rank in range(world)]
    highest = {name: max(each[name] for each in ranks) for name in ("imports_gb", "trained_gb", "saved_gb")}
    return {"processes": world, **highest, "gradient_difference": ranks[0]["difference"]}


def main() -> None:
    """Measure, print, and write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.work)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        parameters = begin(folder / "policy", options.hidden, options.layers)
        found = [measure(folder, world) for world in options.worlds]
    for row in found:
        for name in ("trained", "saved"):
            row[f"{name}_share"] = row[f"{name}_gb"] / found[0][f"{name}_gb"]
            own = [each[f"{name}_gb"] - each["imports_gb"] for each in (row, found[0])]
            row[f"{name}_share_without_imports"] = own[0] / own[1]
        print(json.dumps(row))
    if options.out is not None:
        result = {"parameters": parameters, "dtype": "float32", "optimizer": "AdamW", "rows": found}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
