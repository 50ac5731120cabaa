"""Several processes give the loss curve of one."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, os, sys

import torch
from perturn import TurnConfig, TurnTrainer

folder, output, accumulation = sys.argv[1], sys.argv[2], int(sys.argv[3])
question = {"role": "user", "content": "go"}
answer = {"role": "assistant", "content": "on"}
pairs = [
    {
        "prompt": [question],
        "chosen": [{"role": "assistant", "content": f"north {i}"}, *[question, answer] * (i % 3)],
        "rejected": [{"role": "assistant", "content": f"south {i} " * (1 + i % 4)}],
    }
    for i in range(8)
]
args = TurnConfig(
    output_dir=output + ".out", loss="tlm-dre", use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
    logging_steps=1, learning_rate=1e-3, num_train_epochs=2, per_device_train_batch_size=1,
    gradient_accumulation_steps=accumulation, reference_cache=output + ".cache", seed=3,
)
trainer = TurnTrainer(folder, args, pairs)
trainer.train()
if trainer.is_world_process_zero():
    with open(output, "w") as file:
        json.dump(trainer.state.log_history, file)
torch.distributed.barrier()
os._exit(0)  # gloo's threads sometimes abort the interpreter on its way out
"""


def curve(folder, tmp_path, processes):
    """Log entries of the optimizer steps, four pairs in each."""
    script, output = tmp_path / "script.py", tmp_path / f"log{processes}.json"
    script.write_text(SCRIPT)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    subprocess.run(
        [sys.executable, *launch, script, folder, output, str(4 // processes)],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    return [entry for entry in json.loads(output.read_text()) if "loss" in entry]


def test_two_processes_give_the_loss_curve_of_one(tiny_folder, tmp_path):
    """Both take the same four pairs a step; sums over pairs in another order differ by rounding alone."""
    one, two = curve(tiny_folder, tmp_path, 1), curve(tiny_folder, tmp_path, 2)

    assert len(one) == 4
    for name in ("loss", "rewards/margins", "grad_norm"):
        assert [entry[name] for entry in two] == pytest.approx(
            [entry[name] for entry in one], rel=1e-4, abs=1e-6
        )
