r"""Compare turns per second of the local engine on a GPU with encoding the whole history, and measure GPU use.

    python benchmarks/rollouts_gpu.py --out benchmarks/rollouts_gpu.json        a few minutes

Conversations have 10 turns, with observations of 60 tokens and greedy actions of 20 tokens. The model has random
weights in bfloat16. A ratio is the local engine's turns per second over the peer's, in one process. `busy` is the share
of wall-clock time in which a kernel ran, over two profiled turns of each conversation. `host_us` is the remaining time
in microseconds per turn, which the CPU thread needs to feed the GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from rollouts_sides import Shape, make_scripts, play_ours, time_peer
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from training_models import make_model

CASES = [(size, count) for size in ("15M", "135M", "1B") for count in (1, 16, 64, 256)]
REPEATS = 3


def compare(size: str, conversations: int) -> dict[str, Any]:
    """Return one row of the table."""
    model = make_model(size, 8_192 if size == "15M" else 49_152).to(torch.bfloat16).to("cuda").eval()
    shape = Shape(conversations=conversations)
    scripts = make_scripts(shape)
    play_ours(model, scripts, replace(shape, turns=2))  # warms up
    ours = [play_ours(model, scripts, shape) for _ in range(REPEATS)]
    seconds, agree = time_peer("re-encode", model, scripts, ours[-1], 9 if conversations == 256 else 3)
    spent = median(each.seconds for each in ours)
    return {
        "size": size,
        "conversations": conversations,
        "turns_per_second": round(ours[-1].turns / spent, 1),
        "peer_turns_per_second": round(ours[-1].turns / seconds, 1),
        "ratio": round(seconds / spent, 2),
        "agree": round(agree, 3),
        "gpu_gigabytes": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        **watched(model, replace(shape, turns=2)),
    }


def watched(model: Any, shape: Shape) -> dict[str, float]:
    """Return the share of time in which a kernel ran, and the remaining time in microseconds per turn."""
    scripts = make_scripts(shape)
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        played = play_ours(model, scripts, shape)
        torch.cuda.synchronize()
    kernels = sum(
        each.time_range.elapsed_us() for each in record.events() if each.device_type == DeviceType.CUDA
    )
    wall = 1e6 * played.seconds
    return {"busy": round(kernels / wall, 3), "host_us": round((wall - kernels) / played.turns)}


def main() -> None:
    """Parse the options, measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the rows")
    parser.add_argument(
        "--cases", nargs="+", help="cases such as 135M:64: a size, and how many conversations"
    )
    words = parser.parse_args()
    rows = []
    chosen = [(size, int(count)) for size, count in (each.split(":") for each in words.cases or ())]
    for case in chosen or CASES:
        rows.append(compare(*case))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        print(json.dumps(rows[-1]), flush=True)
        if words.out:
            found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
            words.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
