"""vLLM itself, given the weights of a model in memory. Run by `make test-vllm`; skipped elsewhere.

The transport is a stand-in for a CPU, except in the test that needs a GPU.
"""

import copy
import os
from pathlib import Path

import pytest
import torch

from perturn.engines.protocol import ModelTakingEngine
from perturn.engines.vllm import weight_transfer
from perturn.engines.vllm.engine import VllmEngine
from perturn.engines.vllm.settings import VllmSettings
from perturn.errors import RunError
from perturn.policy.logprobs import action_logprobs
from perturn.policy.models import load_model
from perturn.policy.packing import lay_out
from perturn.types import Prompt, Sampling, Task, Trajectory, Turn
from support.vllm import NEEDS_VLLM, adapters, serving

pytestmark = NEEDS_VLLM

SYSTEM = ({"role": "system", "content": "Play."},)
SAMPLED = Sampling(temperature=1.0, max_new_tokens=30)
EXTENSION = "engines.vllm_cpu_transfer.Extension"


@pytest.fixture
def place(monkeypatch, tmp_path):
    """Where the stand-in keeps its files; settings that name `ipc` or `nccl` get the stand-in."""
    cpu = pytest.importorskip("engines.vllm_cpu_transfer")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
    found = str(tmp_path / "weights")
    made = dict.fromkeys(("ipc", "nccl"), lambda settings, workers: cpu.TrainerInit(rank=0, place=found))
    monkeypatch.setattr(weight_transfer, "TRAINERS", made)
    return found


def other(folder, seed):
    """The policy in a folder with all weights changed by much."""
    model = load_model(str(folder))
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn_like(weight)
    return model


def gap(engine, model, renderer):
    """The largest difference in nats between what the engine says of its tokens and what a model says."""
    heard = ({"role": "user", "content": "an observation"},)
    (action,) = engine.generate([Prompt(SYSTEM, (), heard, 1, "c")], SAMPLED)
    engine.forget("c")
    encoded = renderer.encode(Trajectory(Task("c"), (Turn(heard, action),), prompt=SYSTEM))
    with torch.no_grad():
        scored = action_logprobs(model, lay_out([encoded]))
    return float((scored - torch.tensor(action.logprobs)).abs().max())


def check_taken(engine, folder, renderer, device="cpu", most=1e-3):
    """Each of two models is served right after it was given, and nothing of the model before."""
    assert isinstance(engine, ModelTakingEngine)
    first, second = other(folder, 1), other(folder, 2)
    try:
        assert gap(engine, load_model(str(folder)), renderer) < most
        for name, model in (("v1", first), ("v2", second)):
            engine.sleep()
            engine.take_model(copy.deepcopy(model).to(device), folder, name)
            assert engine.name == name
            assert gap(engine, model, renderer) < most
        assert gap(engine, first, renderer) > 10 * most
    finally:
        engine.close()


def test_vllm_in_this_process_takes_a_model_from_memory(place, folder, renderer):
    """Log-probabilities are of the model that was given last."""
    options = {"enforce_eager": True, "worker_extension_cls": EXTENSION}
    settings = VllmSettings(cache_gigabytes=0.2, handover="ipc", options=options)
    check_taken(VllmEngine(str(folder), renderer, settings, name="v0"), folder, renderer)
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in os.environ


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA IPC needs a GPU")
@pytest.mark.parametrize("sleep", [False, True])
def test_vllm_on_this_gpu_takes_a_model_by_cuda_ipc(folder, renderer, sleep):
    """Without the stand-in. GPUs round float32 more than CPUs."""
    options = {"enforce_eager": True, "gpu_memory_utilization": 0.3}
    settings = VllmSettings(cache_gigabytes=0.2, handover="ipc", sleep=sleep, options=options)
    check_taken(VllmEngine(str(folder), renderer, settings, name="v0"), folder, renderer, "cuda", 1e-2)


def test_a_model_replaces_adapters_and_a_model_that_came_in_part_answers_nothing(
    place, folder, renderer, tmp_path
):
    """Adapters of the policy before are not added to the new weights."""
    options = {"enforce_eager": True, "worker_extension_cls": EXTENSION}
    settings = VllmSettings(cache_gigabytes=0.2, handover="ipc", options=options)
    added = str(adapters(folder, tmp_path / "added", 3))
    engine = VllmEngine(str(folder), renderer, settings, name="v0", adapters=added)
    try:
        assert gap(engine, load_model(added), renderer) < 1e-3
        model = other(folder, 1)
        engine.take_model(model, folder, "v1")
        assert gap(engine, model, renderer) < 1e-3

        engine._transfer._trainer.loads = 2
        with pytest.raises(RunError, match=r"engine.handover=ipc: .*no room for the rest"):
            engine.take_model(other(folder, 2), folder, "v2")
        with pytest.raises(RunError):
            gap(engine, model, renderer)
    finally:
        engine.close()


@pytest.mark.parametrize("step", ["update_weights", "finish_weight_update"])
def test_the_next_run_at_a_server_goes_on_after_an_update_that_was_cut_off(place, folder, renderer, step):
    """After a worker that failed in the middle, and after a run that was killed there; the next run reads files."""
    words = ["--worker-extension-cls", EXTENSION, "--enable-scale-out"]
    words += ["--weight-transfer-config", '{"backend": "nccl"}']
    with serving(folder, *words) as address:
        settings = VllmSettings(servers=[address], handover="nccl")
        engine = VllmEngine(str(folder), renderer, settings, name="v0")
        trainer = engine._transfer._trainer
        trainer.loads = 2
        try:
            trainer.client.start_weight_update()
            if step == "update_weights":
                with pytest.raises(RunError, match="update_weights with 500"):
                    trainer.send_part(other(folder, 2).named_parameters())
        finally:
            engine._loop.close()  # as a kill does, which says nothing to the server
        again = VllmEngine(str(folder), renderer, settings, name="v0")
        try:
            assert gap(again, load_model(str(folder)), renderer) < 1e-3
            model = other(folder, 1)
            again.take_model(model, folder, "v1")
            assert gap(again, model, renderer) < 1e-3
        finally:
            again.close()


def test_two_servers_take_a_model_and_have_ranks_of_their_own(place, folder, renderer):
    """Each worker is told its rank, beginning after the trainer's."""
    words = ["--worker-extension-cls", EXTENSION, "--enable-scale-out"]
    words += ["--weight-transfer-config", '{"backend": "nccl"}']
    with serving(folder, *words) as one, serving(folder, *words) as two:
        settings = VllmSettings(servers=[one, two], handover="nccl")
        check_taken(VllmEngine(str(folder), renderer, settings, name="v0"), folder, renderer)
        assert Path(f"{place}.ends").read_text().split() == ["ended", "ended"]
        check_taken(VllmEngine(str(folder), renderer, settings, name="v3"), folder, renderer)
    assert sorted(Path(f"{place}.ranks").read_text().split()) == ["1", "1", "2", "2"]


def test_servers_that_were_started_without_transfer_say_how_to_start_them(place, folder, renderer):
    """At once, and not after a training."""
    with (
        serving(folder, "--worker-extension-cls", EXTENSION, "--enable-scale-out") as address,
        pytest.raises(RunError, match=r"start it with --weight-transfer-config.*, or leave engine"),
    ):
        VllmEngine(str(folder), renderer, VllmSettings(servers=[address], handover="nccl"), name="v0")
