"""Send a model's weights from memory to vLLM, through vLLM's weight-transfer engines for CUDA IPC or NCCL."""

from __future__ import annotations

import base64
import ipaddress
import pickle
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from safetensors import safe_open

from perturn.engines.event_loop import EventLoop
from perturn.engines.vllm.backend import Backend
from perturn.engines.vllm.settings import VllmSettings
from perturn.engines.vllm.vllm_process import vllm_environment
from perturn.errors import ConfigError, RunError
from perturn.table import locate


def check_transfer(settings: VllmSettings) -> None:
    """Check that this machine can send weights in the way that `engine.handover` names.

    Raises:
        ConfigError: If weights go from GPU to GPU, and this machine has no GPU.
    """
    if settings.traits.takes_models and not locate("torch.cuda:is_available")():
        raise ConfigError(
            f"engine.handover={settings.handover} sends weights from GPU to GPU, and this machine has no GPU that "
            "PyTorch can use; leave engine.handover out, and the weights are read from files."
        )


class WeightTransfer:
    """Connection through which vLLM gets the weights of each newly trained model."""

    def __init__(self, settings: VllmSettings, loop: EventLoop, backend: Backend) -> None:
        """Connect to all replicas.

        Args:
            settings: Settings of the engine; `handover` must be `ipc` or `nccl`.
            loop: Event loop of the backend.
            backend: The open connection to vLLM.

        Raises:
            RunError: If vLLM rejects this kind of transfer.
        """
        workers = loop.run(backend.workers())
        _check_workers(settings, sum(workers))
        self._settings = settings
        self._client = _Client(loop, backend, workers)
        with self._explained(), vllm_environment():
            from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

            if settings.servers:  # a killed run leaves its connection open at the servers
                self._client.shutdown_weight_transfer_engine()
            info = TRAINERS[settings.handover](settings, sum(workers))
            self._trainer = WeightTransferTrainerFactory.trainer_init(
                info, client=self._client, source=_source(_empty())
            )
        self._client.give_up = self._trainer.shutdown
        self._ended = True  # True unless an update was started and not finished

    def send(self, model: Any, folder: str | Path) -> None:
        """Send the weights of a model to all replicas, which then use them.

        Args:
            model: The trained module.
            folder: Folder of the model's checkpoint files, whose tensor names vLLM knows.

        Raises:
            RunError: If the transfer fails, or the model's names differ from the names in the files.
        """
        _check_names(model, folder)
        if self._settings.handover == "ipc":
            self._trainer.packed_buffer_size_bytes = _buffer_bytes(model)
        if locate("torch.cuda:is_available")():
            locate(
                "torch.cuda:synchronize"
            )()  # vLLM packs in other CUDA streams, which do not wait for training
        self._trainer.source, self._ended = _source(model), False
        try:
            with self._explained():
                self._trainer.send_weights()
            self._ended = True
        finally:
            self._trainer.source = _source(_empty())  # without this reference, the model can be freed

    def close(self) -> None:
        """End the connection, also at servers that continue after this run."""
        self._trainer.shutdown()
        if self._settings.servers and self._ended:  # after an unfinished update a worker may never answer
            with suppress(RunError):  # a server that has stopped has no connection to close
                self._client.shutdown_weight_transfer_engine()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert any error of vLLM to a `RunError` with a remedy."""
        try:
            yield
        except Exception as error:
            self._client.failure = self._client.failure or error
            causes = dict.fromkeys(f"{type(each).__name__}: {each}" for each in (self._client.failure, error))
            remedy = "Restart servers that no longer answer, or leave" if self._settings.servers else "Leave"
            raise RunError(
                f"vLLM does not take weights by engine.handover={self._settings.handover}: {'; '.join(causes)} "
                f"{remedy} engine.handover out; the same command goes on."
            ) from error


class _Client:
    """Forwards the calls of vLLM's trainer to the replicas; implements vLLM's protocol `VLLMWeightSyncClient`."""

    def __init__(self, loop: EventLoop, backend: Backend, workers: list[int]) -> None:
        self._loop, self._backend, self._workers = loop, backend, workers
        self.failure: Exception | None = None
        """The first error of a call to a replica. It often causes the later errors."""
        self.give_up: Callable[[], None] = lambda: None
        """Function that stops the sender, which would otherwise wait for failed workers."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect all replicas, and give each replica its first rank."""
        bodies, first = [], init_info.get("rank_offset")
        for count in self._workers:
            bodies.append({"init_info": init_info if first is None else init_info | {"rank_offset": first}})
            first = None if first is None else first + count
        self._pass_on("init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        """Tell all replicas that an update of the weights starts."""
        self._pass_on("start_weight_update", [{} for _ in self._workers])

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Forward the names and locations of weights. Handles of GPU memory are sent as text."""
        said = dict(update_info)
        if handles := said.pop("ipc_handles", None):
            said["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        said = {key: value for key, value in said.items() if value is not None}
        self._pass_on("update_weights", [{"update_info": said} for _ in self._workers])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Tell all replicas that the update is complete. `weight_version` is ignored: the engine names the weights."""
        self._pass_on("finish_weight_update", [{} for _ in self._workers])

    def shutdown_weight_transfer_engine(self) -> None:
        """Disconnect all replicas."""
        self._pass_on("shutdown_weight_transfer_engine", [{} for _ in self._workers])

    def _pass_on(self, step: str, bodies: list[dict[str, Any]]) -> None:
        try:
            self._loop.run(self._backend.transfer(step, bodies))
        except Exception as error:
            self.failure = self.failure or error
            self.give_up()  # NCCL has no time limit of its own
            raise


def _check_workers(settings: VllmSettings, workers: int) -> None:
    """Check that the transfer reaches all workers.

    Raises:
        RunError: If `handover` is `ipc` and vLLM has several workers: CUDA IPC stays on one GPU.
    """
    if settings.handover == "ipc" and workers > 1:
        raise RunError(
            f"engine.handover=ipc reaches one worker, on the GPU that trains, and vLLM has {workers}; leave "
            "engine.replicas and parallel sizes in engine.options out, or leave engine.handover out."
        )


def _check_names(model: Any, folder: str | Path) -> None:
    """Check that a model's parameters have the same names as the tensors in its checkpoint files.

    vLLM knows the names in the files. If it gets no weights for a layer, it keeps the old ones without an error.

    Raises:
        RunError: If a parameter has no tensor in the files, or a tensor has no parameter. A parameter with several
            names, such as a tied weight, needs only one of them in the files.
    """
    stored = {name for file in Path(folder).glob("*.safetensors") for name in _names_in(file)}
    aliases: dict[int, set[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(weight), set()).add(name)
    unsaved = [min(names) for names in aliases.values() if not names & stored]
    unsent = stored.difference(*aliases.values())
    if different := sorted([*unsaved, *unsent]):
        raise RunError(
            f"engine.handover cannot send this model, whose weights have other names in memory than in {folder}: "
            f"{different[0]} and {len(different) - 1} more; leave engine.handover out, and the same command goes on."
        )


def _names_in(file: Path) -> list[str]:
    """Return the names of the tensors in a file."""
    opened: Any
    with safe_open(file, "np") as opened:
        return list(opened.keys())


_BUFFER_BYTES = 2**30
"""Default size of the CUDA IPC buffer in bytes, as in vLLM. A larger tensor needs a larger buffer."""


def _buffer_bytes(model: Any) -> int:
    """Return the size in bytes of the buffer that sends a model's weights."""
    sizes: list[int] = [weight.numel() * weight.element_size() for weight in model.parameters()]
    return max(*sizes, min(_BUFFER_BYTES, sum(sizes)))


def _ipc(settings: VllmSettings, workers: int) -> Any:
    """Return vLLM's settings for a trainer on the same GPU."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    return IPCTrainerInitInfo(rank=0, packed=True)


def _nccl(settings: VllmSettings, workers: int) -> Any:
    """Return vLLM's settings for a trainer to which the workers of all servers connect at a free port."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    address, port = _own_address(settings.servers)
    # With two buffers, vLLM 0.32 loads a layer that is split over two packs before the second pack has arrived.
    return NCCLTrainerInitInfo(address, port, 1 + workers, rank=0, packed_num_buffers=1)


TRAINERS: dict[str, Callable[[VllmSettings, int], Any]] = {"ipc": _ipc, "nccl": _nccl}
"""`engine.handover` -> function that returns vLLM's settings for the training side."""


def _own_address(servers: Sequence[str]) -> tuple[str, int]:
    """Return an address at which all servers reach this machine, and a free port."""
    seen = [_seen_by(server) for server in servers]
    address = next((each for each in seen if not ipaddress.ip_address(each).is_loopback), seen[0])
    with socket.socket() as free:
        free.bind((address, 0))
        return address, int(free.getsockname()[1])


def _seen_by(server: str) -> str:
    """Return the address of this machine as a server sees it."""
    parts = urlsplit(server)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((parts.hostname, parts.port or 80))  # nothing is sent
        address: str = towards.getsockname()[0]
        return address


def _empty() -> Any:
    """Return a module without weights."""
    return locate("torch.nn:Module")()


def _source(model: Any) -> Any:
    from vllm.distributed.weight_transfer.base import ModuleSource

    return ModuleSource(model)
