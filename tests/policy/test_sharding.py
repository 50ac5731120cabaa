"""FSDP2 on processes of the CPU, through torch's `fully_shard`: gradients, checkpoints, and what is rejected."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from perturn.errors import ConfigError
from perturn.training.sharding import divide
from support.models import make_tiny_model
from support.ports import free_port

SCRIPT = """
import os, sys

import torch
from transformers import TrainerCallback

from perturn import TurnConfig, TurnTrainer
from perturn.training.sharding import _whole, fsdp2, whole_weights

folder, output = sys.argv[1:3]


def pair(i):
    return {
        "prompt": [{"role": "user", "content": "look " * (i % 5)}],
        "chosen": [{"role": "assistant", "content": f"north {i}"}],
        "rejected": [{"role": "assistant", "content": f"south {i} " * (1 + 3 * i % 11)}],
    }


class Noted(TrainerCallback):
    def __init__(self, found):
        self.found = found

    def on_train_begin(self, args, state, control, model, **_):
        self.note("read", model, self.trainer.optimizer)

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        if state.global_step == 0:
            self.found["gradients"] = {n: _whole(p.grad, True) for n, p in model.named_parameters()}

    def on_save(self, args, state, control, model, **_):
        if state.global_step == 1:
            self.note("saved", model, self.trainer.optimizer)

    def note(self, when, model, optimizer):
        divided = self.trainer.is_fsdp_enabled
        weights = whole_weights(model) if divided else model.state_dict()
        found = {n: w.clone() for n, w in weights.items() if n != "lm_head.weight"}
        moments = [
            {name: _whole(value, True).clone() for name, value in of_weight.items()}
            for of_weight in optimizer.state_dict()["state"].values()
        ]
        self.found[when] = found, moments


def work(rank, world, port):
    if world > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }
    for name, resumed in (("fresh", None), ("resumed", f"{output}/fresh-2/checkpoint-1")):
        args = TurnConfig(
            output_dir=f"{output}/{name}-{world}", use_cpu=True, report_to=[], disable_tqdm=True, seed=3, loss="dpo",
            learning_rate=1e-3, token_budget=120, per_device_train_batch_size=4 // world, max_steps=2,
            save_strategy="steps", save_steps=1, reference_cache=f"{output}/cache-{world}-{rank}", max_grad_norm=0.0,
            logging_steps=1, **(fsdp2(False) if world > 1 else {}),
        )
        noted = Noted({})
        trainer = noted.trainer = TurnTrainer(folder, args, [pair(i) for i in range(13)], callbacks=[noted])
        trainer.train(resume_from_checkpoint=resumed)
        noted.note("end", trainer.model, trainer.optimizer)
        if rank == 0:
            noted.found["losses"] = [e["loss"] for e in trainer.state.log_history if "loss" in e]
            torch.save(noted.found, f"{output}/{name}-{world}.pt")
        trainer.accelerator.wait_for_everyone()
    os._exit(0)  # gloo's threads sometimes abort the interpreter on its way out


for world, port in zip((2, 1, 4), sys.argv[3:]):
    torch.multiprocessing.start_processes(work, (world, port), nprocs=world, start_method="fork")
"""


@pytest.fixture(scope="module")
def trained(tiny_folder, tmp_path_factory):
    """What one process, two and four found: fresh, and resumed from the checkpoint of two."""
    output = tmp_path_factory.mktemp("sharding")
    (output / "script.py").write_text(SCRIPT)
    command = [sys.executable, output / "script.py", tiny_folder, output, *(free_port() for _ in range(3))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(command, env=environment, start_new_session=True) as script:
        try:
            assert script.wait(timeout=500) == 0
        finally:
            if script.poll() is None:  # a deadlock: its processes wait for each other for ever
                os.killpg(script.pid, signal.SIGKILL)

    def found(name, world):
        return torch.load(output / f"{name}-{world}.pt", weights_only=True)

    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_gradients_losses_and_weights_are_those_of_one_process(trained, world):
    """Unequal packs in each process; divided in another way, sums differ by rounding alone.

    Weights after a step of Adam are not compared: it divides by the size of a gradient that may be rounding alone.
    """
    one, several = trained("fresh", 1), trained("fresh", world)

    largest = max(each.abs().max() for each in one["gradients"].values())
    assert_close(several["gradients"], one["gradients"], rtol=0, atol=1e-6 * max(1.0, float(largest)))
    assert several["losses"] == pytest.approx(one["losses"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_checkpoint_of_two_processes_is_read_to_the_bit_by_one_two_and_four(trained, world):
    """Weights and the moments of Adam; the step after it equals the step of the two processes."""
    saved, read = trained("fresh", 2)["saved"], trained("resumed", world)["read"]

    assert_close(read[0], saved[0], rtol=0, atol=0)
    assert len(read[1]) == len(saved[1]) > 0
    for mine, other in zip(read[1], saved[1], strict=True):
        assert_close(mine, other, rtol=0, atol=0)
    losses = trained("fresh", 2)["losses"]
    assert trained("resumed", world)["losses"] == pytest.approx(losses, abs=1e-5)


def test_a_weight_that_is_smaller_than_the_number_of_processes_is_rejected():
    """It would leave some processes without a part, and the optimizer could not tell such parts apart."""
    model = make_tiny_model(0)
    model.small = torch.nn.Parameter(torch.zeros(2))

    with pytest.raises(
        ConfigError, match=r"weight small must have a first dimension >= 4, .* got \(2,\)\. Or take"
    ):
        divide(model, 4, cpu_offload=False)


def test_a_model_that_names_no_layers_is_rejected():
    """Divided as a whole, it would be gathered as a whole."""
    with pytest.raises(ConfigError, match=r"and Linear does not name its layers; take launch.sharding=none"):
        divide(torch.nn.Linear(8, 8), 2, cpu_offload=False)


def test_fsdp_of_accelerates_configuration_is_rejected_on_cpus(make_trainer, monkeypatch):
    """It would train whole copies and not say so."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")

    with pytest.raises(ConfigError, match="accelerate does not divide a model among CPUs"):
        make_trainer(
            [{"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "on"}]}],
            loss="sft",
        )
