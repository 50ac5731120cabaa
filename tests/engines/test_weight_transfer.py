"""Weights sent to vLLM from memory: our side, against a vLLM of a few lines that keeps vLLM's names."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_model
from torch import nn

from engines.serving import serve
from engines.transfer_backend import Backend, tied
from engines.vllm_server import Server
from perturn.engines.event_loop import EventLoop
from perturn.engines.vllm import weight_transfer
from perturn.engines.vllm.engine import VllmEngine
from perturn.engines.vllm.settings import VllmSettings
from perturn.engines.vllm.weight_transfer import WeightTransfer
from perturn.errors import RunError

SERVERS = ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]
PACKAGE = "vllm.distributed.weight_transfer"


@dataclass
class Info:
    """What describes a trainer: the arguments."""

    given: tuple
    settings: dict


@dataclass
class Source:
    """A module, as vLLM is given one."""

    module: nn.Module


@dataclass
class Trainer:
    """The sending side. As NCCL does, it waits for the workers until its connection is ended."""

    info: Info
    client: object
    source: Source
    packed_buffer_size_bytes: int = 0
    sent: list = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def send_weights(self):
        """Tell the workers in a thread, and wait for all weights to be taken."""
        self.client.start_weight_update()
        names = [name for name, _ in self.source.module.named_parameters()]
        executor = ThreadPoolExecutor(1)
        told = executor.submit(self.client.update_weights, {"names": names, "ipc_handles": None})
        told.add_done_callback(lambda done: None if done.exception() else self.ended.set())
        assert self.ended.wait(20), "it waits for workers for ever"
        executor.shutdown(wait=False)
        told.result()
        self.ended.clear()
        self.client.finish_weight_update()
        self.sent.append(self.source.module)

    def shutdown(self):
        """Stop waiting."""
        self.ended.set()


@pytest.fixture
def trainers(monkeypatch):
    """The trainers that were made, by the stand-in."""
    made = []

    class Factory:
        """vLLM's factory."""

        @staticmethod
        def trainer_init(info, *, client, source):
            """Make a trainer, and meet the workers."""
            client.init_weight_transfer_engine({"rank_offset": 1} if info.given else {})
            made.append(Trainer(info, client, source))
            return made[-1]

    def described(*given, **settings):
        return Info(given, settings)

    parts = {
        "": {},
        ".factory": {"WeightTransferTrainerFactory": Factory},
        ".base": {"ModuleSource": Source},
        ".ipc_engine": {"IPCTrainerInitInfo": described},
        ".nccl_engine": {"NCCLTrainerInitInfo": described},
    }
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, members in parts.items():
        module = ModuleType(PACKAGE + name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, PACKAGE + name, module)
    return made


@pytest.fixture
def connect(trainers):
    """Make connections to a backend."""
    loop = EventLoop("test")

    def made(backend, **settings):
        return WeightTransfer(VllmSettings(**settings), loop, backend)

    yield made
    loop.close()


@pytest.fixture
def saved(tmp_path):
    """Write a model to a folder."""

    def write(model):
        save_model(model, str(tmp_path / "model.safetensors"))
        return tmp_path

    return write


def test_a_model_is_sent_once_and_given_up(connect, trainers, saved):
    """In vLLM's order; names of one weight count as one."""
    backend, model = Backend([1]), tied()
    transfer = connect(backend, handover="ipc")
    transfer.send(model, saved(model))
    transfer.close()

    assert trainers[0].sent == [model]
    assert not list(trainers[0].source.module.parameters())
    steps = ["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
    assert backend.steps() == steps


@pytest.mark.parametrize(
    ("shapes", "size"),
    [([(6, 5), (5,)], 140), ([(2**28, 2), (3,)], 2**31), ([(2**27, 1), (2**27, 1), (2**27, 1)], 2**30)],
)
def test_the_buffer_of_ipc_holds_the_largest_tensor(connect, trainers, monkeypatch, shapes, size):
    """By default vLLM takes 1 GiB, and rejects larger tensors; the embeddings of an 8B model have 2 GB in float32."""
    monkeypatch.setattr(weight_transfer, "_check_names", lambda *_: None)
    model = nn.ParameterList([nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes])
    connect(Backend([1]), handover="ipc").send(model, "nowhere")

    assert trainers[0].packed_buffer_size_bytes == size


def test_nccl_sends_one_pack_at_a_time_to_all_servers_each_with_its_ranks(connect, trainers):
    """The connection of a killed run is ended first, or vLLM cannot make another one."""
    backend = Backend([2, 1])
    connect(backend, servers=SERVERS, handover="nccl")

    address, port, world = trainers[0].info.given
    assert (address, world) == ("127.0.0.1", 4)
    assert port > 0
    assert trainers[0].info.settings == {"rank": 0, "packed_num_buffers": 1}
    assert backend.steps() == ["shutdown_weight_transfer_engine", "init_weight_transfer_engine"]
    ranks = [body["init_info"]["rank_offset"] for body in backend.told[1][1]]
    assert ranks == [1, 3]


def test_servers_on_other_machines_decide_the_address(monkeypatch):
    """A server elsewhere cannot reach 127.0.0.1; a server here reaches every address of this machine."""
    seen = {"http://127.0.0.1:8000": "127.0.0.1", "http://gpu2:8000": "127.0.0.2", "http://gpu3": "0.0.0.0"}
    monkeypatch.setattr(weight_transfer, "_seen_by", seen.__getitem__)

    assert weight_transfer._own_address(list(seen))[0] == "0.0.0.0"
    assert weight_transfer._own_address(list(seen)[:2])[0] == "127.0.0.1"


def test_a_host_without_an_address_is_an_error_with_what_to_do(connect):
    """And no traceback of sockets."""
    with pytest.raises(
        RunError, match=r"handover=nccl: gaierror.*leave engine.handover out; the same command"
    ):
        connect(Backend([1]), servers=["http://nowhere.invalid:80"], handover="nccl")


def test_a_server_that_fails_ends_the_sending_and_is_asked_nothing_more(connect, saved):
    """NCCL waits without a limit for a worker that does not receive."""
    backend, model = Backend([1, 1], fails="update_weights"), tied()
    transfer = connect(backend, servers=SERVERS, handover="nccl")
    with pytest.raises(
        RunError, match="RunError: a worker is out of memory Restart servers that no longer answer"
    ):
        transfer.send(model, saved(model))
    transfer.close()

    assert backend.steps()[-1] == "update_weights"


def test_an_interrupt_does_not_ask_servers_that_may_wait(connect, trainers, saved, monkeypatch):
    """They would answer after minutes, or never."""
    backend, model = Backend([1]), tied()
    transfer = connect(backend, servers=SERVERS[:1], handover="nccl")

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(trainers[0], "send_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        transfer.send(model, saved(model))
    transfer.close()

    assert backend.steps() == ["shutdown_weight_transfer_engine", "init_weight_transfer_engine"]
    assert trainers[0].ended.is_set()


def test_workers_on_other_gpus_are_refused_by_ipc(connect):
    """Before anything is trained."""
    with pytest.raises(RunError, match=r"reaches one worker.*and vLLM has 2; leave engine.replicas and"):
        connect(Backend([2]), handover="ipc")


@pytest.mark.parametrize("extra", [{"written": nn.Linear(2, 2)}, {}])
def test_a_model_that_is_stored_under_other_names_is_refused(connect, saved, extra):
    """As experts are, which transformers stacks in memory: vLLM would keep old weights without an error."""
    backend, model = Backend([1]), tied()
    folder = saved(nn.ModuleDict({**model, **extra}) if extra else nn.ModuleDict({"other": nn.Linear(2, 2)}))
    transfer = connect(backend, handover="ipc")
    with pytest.raises(RunError, match=r"have other names in memory than in .*: (written|embed)\.\w+ and"):
        transfer.send(model, folder)

    assert backend.steps() == ["init_weight_transfer_engine"]


def test_variables_that_vllm_sets_are_not_passed_on(connect, trainers, monkeypatch):
    """Processes of environments would inherit them."""

    def described(*given, **settings):
        os.environ["VLLM_WAS_IMPORTED"] = "1"
        return Info(given, settings)

    monkeypatch.setattr(sys.modules[f"{PACKAGE}.nccl_engine"], "NCCLTrainerInitInfo", described)
    connect(Backend([1]), servers=SERVERS[:1], handover="nccl")

    assert "VLLM_WAS_IMPORTED" not in os.environ


ABOUT = "/server_info?config_format=json"


@pytest.fixture
def server(monkeypatch):
    """A stand-in for a vLLM server that was started for NCCL."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    found = Server()
    found.says[ABOUT] = (200, {"vllm_config": {"weight_transfer_config": {"backend": "nccl"}}})
    with serve(found.answer) as found.url:
        yield found


def opened(server, **settings):
    """Open an engine at the server, and close it."""
    VllmEngine(
        "served", None, VllmSettings(servers=[server.url], max_retries=0, **settings), name="v1"
    ).close()


@pytest.mark.parametrize("config", [None, {"backend": "ipc"}])
def test_a_server_without_nccl_is_refused_at_once(server, config):
    """The sending side would wait for its workers for five minutes."""
    server.says[ABOUT] = (200, {"vllm_config": {"weight_transfer_config": config}})
    with pytest.raises(
        RunError, match=r"take weights from memory; start it with --weight-transfer-config '{"
    ):
        opened(server, handover="nccl")

    assert "/inference/v1/generate" not in server.paths()


@pytest.mark.parametrize(("active", "steps"), [(True, ["finish"]), (False, ["finish", "start", "finish"])])
def test_an_update_that_was_cut_off_is_ended_before_anything_else(server, active, steps):
    """By the next run, whatever its handover. A prompt before that would end vLLM, and a load would mix weights."""
    server.version = "loading"
    server.says["/start_weight_update"] = (200, {})
    server.says["/finish_weight_update"] = lambda _, number: (200 if active or number > 1 else 500, {})
    opened(server)
    paths = server.paths()

    asked = [each for each in paths if "weight_update" in each]
    assert asked == [f"/{step}_weight_update" for step in steps]
    last = max(number for number, path in enumerate(paths) if "weight_update" in path)
    assert last < paths.index("/inference/v1/generate") < paths.index("/collective_rpc")


def test_a_load_that_was_cut_off_at_a_server_without_transfer_is_done_again(server):
    """Such a server finishes the load by itself."""
    server.version = "loading"
    server.says[ABOUT] = (200, {"vllm_config": {"weight_transfer_config": None}})
    opened(server)

    assert "/collective_rpc" in server.paths()
