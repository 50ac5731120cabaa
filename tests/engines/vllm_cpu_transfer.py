"""A weight transfer of vLLM for a CPU, through a file: it stands for CUDA IPC and NCCL, which need GPUs.

vLLM's workers import it by `--worker-extension-cls`. The layers are loaded as vLLM's own transfers load them.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from perturn.engines.vllm.worker import CpuReload

BACKENDS = ("ipc", "nccl")
"""The backends of vLLM whose place it takes."""


class Extension(CpuReload):
    """A worker's extension, whose import registers the transfer in its process."""


@dataclass
class Init(WeightTransferInitInfo):
    """What a worker is told first: a path that begins the name of the file, and the first of its ranks."""

    place: str
    rank_offset: int


@dataclass
class Update(WeightTransferUpdateInfo):
    """What a worker is told each time."""

    file: str
    loads: int | None = None
    """Weights after which the worker fails; None: it loads all."""


class FileTransfer(WeightTransferEngine):
    """Side of a worker."""

    init_info_cls, update_info_cls = Init, Update

    def init_transfer_engine(self, init_info):
        """Write the rank, so that a test can read it."""
        self.place = init_info.place
        with open(f"{init_info.place}.ranks", "a") as ranks:
            ranks.write(f"{init_info.rank_offset}\n")

    def start_weight_update(self):
        """Prepare the layers."""
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self):
        """Finish the layers; the packed output layer of a CPU is left out by vLLM 0.32."""
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.model.modules():
            if type(layer).__name__ == "ParallelLMHead":
                layer.quant_method.process_weights_after_loading(layer)

    def update_weights(self, update_info):
        """Load the weights."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info):
        """Load the weights."""
        weights = list(torch.load(update_info.file).items())
        self.model.load_weights(weights[: update_info.loads])
        if update_info.loads is not None:
            raise MemoryError("no room for the rest")

    def shutdown(self):
        """Write that the connection ended, if there was one."""
        if place := getattr(self, "place", ""):
            with open(f"{place}.ends", "a") as ends:
                ends.write("ended\n")
            self.place = ""


@dataclass
class TrainerInit(TrainerInitInfo):
    """What describes the trainer."""

    backend: ClassVar[str] = BACKENDS[0]
    place: str = ""


class FileTrainer(TrainerWeightTransferEngine):
    """Side of the trainer."""

    init_info_cls = TrainerInit
    loads = None

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        """Tell the workers where."""
        found = cls(client=client, source=source)
        found.file = f"{init_info.place}.pt"
        client.init_weight_transfer_engine({"place": init_info.place, "rank_offset": 1})
        return found

    def send_weights(self):
        """Write the weights, and have them read."""
        self.client.start_weight_update()
        self.send_part(self.source)
        self.client.finish_weight_update()

    def send_part(self, source):
        """Write weights, and have them read."""
        torch.save({name: weight.detach() for name, weight in source}, self.file)
        self.client.update_weights({"file": self.file, "loads": self.loads})


for factory, made in (
    (WeightTransferEngineFactory, FileTransfer),
    (WeightTransferTrainerFactory, FileTrainer),
):
    for backend in BACKENDS:
        factory._registry.pop(backend)
        factory.register_engine(backend, made)
