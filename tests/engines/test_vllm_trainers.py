"""The sending sides of vLLM itself, without workers and without a GPU. Run by `make test-vllm`; skipped elsewhere."""

import threading

import pytest
import torch
from safetensors.torch import save_model

from engines.transfer_backend import Backend, tied
from perturn.engines.event_loop import EventLoop
from perturn.engines.vllm.settings import VllmSettings
from perturn.engines.vllm.weight_transfer import WeightTransfer
from perturn.errors import RunError
from support.vllm import NEEDS_VLLM

pytestmark = NEEDS_VLLM

SERVERS = ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]


@pytest.fixture
def saved(tmp_path):
    """The folder of the model that is sent."""
    save_model(tied(), str(tmp_path / "model.safetensors"))
    return tmp_path


@pytest.fixture
def connect(monkeypatch):
    """Make connections to a backend."""
    loop = EventLoop("test")
    yield lambda backend, **settings: WeightTransfer(VllmSettings(**settings), loop, backend)
    loop.close()


class Group:
    """A connection of NCCL: a broadcast ends when the workers have received, or when it is destroyed."""

    def __init__(self):
        self.free, self.sent, self.destroyed = threading.Event(), [], False

    def broadcast(self, iterator, **settings):
        """Send all weights."""
        self.sent.append(([name for name, _ in iterator], settings))
        assert self.free.wait(20), "it waits for workers for ever"

    def destroy(self):
        """Stop waiting."""
        self.destroyed = True
        self.free.set()


@pytest.fixture
def nccl(monkeypatch):
    """VLLM's NCCL trainer with a connection of ours."""
    engine = pytest.importorskip("vllm.distributed.weight_transfer.nccl_engine")
    group = Group()
    monkeypatch.setattr(engine, "open_trainer_endpoint", lambda info: group)
    monkeypatch.setattr(
        engine, "packed_nccl_broadcast_producer", lambda group, **given: group.broadcast(**given)
    )
    return engine, group


def test_the_nccl_trainer_sends_what_the_workers_are_told(nccl, connect, saved):
    """VLLM's own classes read all that the servers get."""
    engine, group = nccl
    backend = Backend([2, 1])
    transfer = connect(backend, servers=SERVERS, handover="nccl")
    group.free.set()
    transfer.send(tied(), saved)
    transfer.close()
    told = dict(backend.told)

    infos = [
        engine.NCCLWeightTransferInitInfo(**body["init_info"]) for body in told["init_weight_transfer_engine"]
    ]
    assert [(info.rank_offset, info.world_size, info.packed) for info in infos] == [
        (1, 4, True),
        (3, 4, True),
    ]
    update = engine.NCCLWeightTransferUpdateInfo(**told["update_weights"][0]["update_info"])
    ((names, settings),) = group.sent
    assert update.names == names == ["embed.weight"]
    assert update.shapes == [[6, 5]]
    assert settings["num_buffers"] == infos[0].packed_num_buffers == 1
    assert group.destroyed


def test_the_nccl_trainer_stops_when_a_server_fails(nccl, connect, saved):
    """In vLLM it waits for its workers, and a failed request does not end that."""
    _, group = nccl
    transfer = connect(Backend([1], fails="update_weights"), servers=SERVERS[:1], handover="nccl")
    with pytest.raises(RunError, match="a worker is out of memory"):
        transfer.send(tied(), saved)

    assert group.destroyed


def test_the_ipc_trainer_sends_handles_that_the_worker_reads(monkeypatch, connect, saved):
    """As text, which vLLM's own class turns back into the handles."""
    engine = pytest.importorskip("vllm.distributed.weight_transfer.ipc_engine")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setattr("torch.accelerator.current_device_index", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: type("Card", (), {"uuid": "GPU-1"}))
    monkeypatch.setattr("torch.cuda.ipc_collect", lambda: None)
    handle = {"GPU-1": (torch.Tensor, (30,), b"handle")}
    sizes = []

    def packed(iterator, gpu_uuid, post_iter_func, buffer_size_bytes):
        sizes.append(buffer_size_bytes)
        for name, weight in iterator:
            size = [weight.numel() * weight.element_size()]
            yield engine_chunk([name], [list(weight.shape)], ["float32"], size, handle)

    engine_chunk = pytest.importorskip("vllm.distributed.weight_transfer.packed_tensor").PackedIpcChunk
    monkeypatch.setattr(engine, "packed_ipc_producer", packed)
    backend = Backend([1])
    connect(backend, handover="ipc").send(tied(), saved)
    told = dict(backend.told)

    assert engine.IPCWeightTransferInitInfo(**told["init_weight_transfer_engine"][0]["init_info"]).packed
    update = engine.IPCWeightTransferUpdateInfo(**told["update_weights"][0]["update_info"])
    assert update.ipc_handles == handle
    assert (update.names, update.tensor_sizes, sizes) == (["embed.weight"], [120], [120])
