"""Weights of a model in memory, given to vLLM by its own weight-transfer engines: CUDA IPC or NCCL."""

from __future__ import annotations

import base64
import pickle
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from perturn.engines.event_loop import EventLoop
from perturn.engines.vllm.backend import Backend
from perturn.engines.vllm.settings import VllmSettings
from perturn.errors import ConfigError, RunError
from perturn.table import locate


def check_transfer(settings: VllmSettings) -> None:
    """Check that this machine can send weights in the way that the settings name.

    Raises:
        ConfigError: If they are sent between GPUs, and there is none.
    """
    if settings.traits.takes_models and not locate("torch.cuda:is_available")():
        raise ConfigError(
            f"engine.handover={settings.handover} sends weights from GPU to GPU, and this machine has no GPU that "
            "PyTorch can use; leave engine.handover out, and the weights are read from files."
        )


class WeightTransfer:
    """Connection through which vLLM gets the weights of one model after the other."""

    def __init__(self, settings: VllmSettings, loop: EventLoop, backend: Backend) -> None:
        """Connect to all replicas.

        Args:
            settings: Of the engine; `handover` is not `disk`.
            loop: In which the backend works.
            backend: vLLM, open.

        Raises:
            RunError: If vLLM does not take weights in this way.
        """
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        workers = loop.run(backend.workers())
        self._client = _Client(loop, backend, workers)
        info = TRAINERS[settings.handover](settings, sum(workers))
        with _explained(settings):
            self._trainer = WeightTransferTrainerFactory.trainer_init(
                info, client=self._client, source=_source(_empty())
            )
        self._settings = settings

    def send(self, model: Any) -> None:
        """Replace the weights of all replicas by the weights of a model.

        Raises:
            RunError: If that fails.
        """
        self._trainer.source = _source(model)
        try:
            with _explained(self._settings):
                self._trainer.send_weights()
        finally:
            self._trainer.source = _source(_empty())  # so that the model can be freed

    def close(self) -> None:
        """End the connection, also at the servers, which outlive this run."""
        self._trainer.shutdown()
        if self._settings.servers:
            with suppress(RunError):  # a server that is gone holds no connection
                self._client.shutdown_weight_transfer_engine()


class _Client:
    """Passes the calls of vLLM's trainer on to the replicas, which is vLLM's protocol `VLLMWeightSyncClient`."""

    def __init__(self, loop: EventLoop, backend: Backend, workers: list[int]) -> None:
        self._loop, self._backend, self._workers = loop, backend, workers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect; each replica is told the first of its ranks."""
        bodies, first = [], init_info.get("rank_offset")
        for count in self._workers:
            bodies.append({"init_info": init_info if first is None else init_info | {"rank_offset": first}})
            first = None if first is None else first + count
        self._pass_on("init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        """Begin."""
        self._pass_on("start_weight_update", [{} for _ in self._workers])

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Pass the names and places of weights on; handles of a GPU's memory travel as text."""
        said = dict(update_info)
        if handles := said.pop("ipc_handles", None):
            said["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        said = {key: value for key, value in said.items() if value is not None}
        self._pass_on("update_weights", [{"update_info": said} for _ in self._workers])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End; the engine labels the weights itself."""
        self._pass_on("finish_weight_update", [{} for _ in self._workers])

    def shutdown_weight_transfer_engine(self) -> None:
        """Disconnect."""
        self._pass_on("shutdown_weight_transfer_engine", [{} for _ in self._workers])

    def _pass_on(self, step: str, bodies: list[dict[str, Any]]) -> None:
        self._loop.run(self._backend.transfer(step, bodies))


def _ipc(settings: VllmSettings, workers: int) -> Any:
    """Describe a trainer on the same GPU as vLLM."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    return IPCTrainerInitInfo(rank=0, packed=True)


def _nccl(settings: VllmSettings, workers: int) -> Any:
    """Describe a trainer that the workers of all servers meet at a free port of this machine."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    address, port = _own_address(settings.servers[0])
    return NCCLTrainerInitInfo(address, port, 1 + workers, rank=0)


TRAINERS: dict[str, Callable[[VllmSettings, int], Any]] = {"ipc": _ipc, "nccl": _nccl}
"""Descriptions of the training side for vLLM, by `engine.handover`."""


def _own_address(server: str) -> tuple[str, int]:
    """Return the address of this machine as a server sees it, and a free port."""
    parts = urlsplit(server)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((parts.hostname, parts.port or 80))  # nothing is sent
        address: str = towards.getsockname()[0]
    with socket.socket() as free:
        free.bind((address, 0))
        return address, int(free.getsockname()[1])


def _empty() -> Any:
    """Return a module without weights."""
    return locate("torch.nn:Module")()


def _source(model: Any) -> Any:
    from vllm.distributed.weight_transfer.base import ModuleSource

    return ModuleSource(model)


@contextmanager
def _explained(settings: VllmSettings) -> Iterator[None]:
    """Raise what goes wrong in vLLM as a `RunError`."""
    try:
        yield
    except Exception as error:
        start = '--weight-transfer-config \'{"backend": "nccl"}\''
        remedy = f"start the servers with {start}, or " if settings.servers else ""
        raise RunError(
            f"vLLM does not take weights by engine.handover={settings.handover}: {type(error).__name__}: {error} "
            f"To mend it, {remedy}leave engine.handover out; the same command goes on."
        ) from error
