"""FSDP2: weights, gradients and optimizer state sharded over processes with torch's `fully_shard`.

On CPUs, accelerate silently uses plain data parallelism even if FSDP is configured. This module shards the model before
accelerate gets it, with the same code on CPUs and GPUs.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, Trainer
from transformers.trainer import FSDP_MODEL_NAME, OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils.peft_utils import ADAPTER_SAFE_WEIGHTS_NAME

from perturn.errors import ConfigError, ModelError, check_fit
from perturn.policy.logprobs import prepare
from perturn.policy.models import resuming

_WEIGHTS, _OPTIMIZER = f"{FSDP_MODEL_NAME}_0", "optimizer_0"
"""Names of the folders with sharded weights and optimizer in a checkpoint."""


def fsdp2(cpu_offload: bool) -> dict[str, Any]:
    """Return the settings of `TurnConfig` that shard the model over the processes.

    Args:
        cpu_offload: Whether to keep the shards in main memory.
    """
    config = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", "auto_wrap_policy": "NO_WRAP"}
    return {"fsdp": True, "fsdp_config": {**config, "cpu_offload": cpu_offload}}


def divide(model: nn.Module, processes: int, cpu_offload: bool) -> None:
    """Shard the weights of a model over the processes, layer by layer.

    Args:
        model: The model with its adapters, equal in all processes.
        processes: Number of processes.
        cpu_offload: Whether to keep the shards in main memory.

    Raises:
        ConfigError: If a weight is too small to shard, or the model does not name its layers.
    """
    for name, weight in model.named_parameters():
        must = f"have a first dimension >= {processes}, the processes of launch.sharding=fsdp2"
        fits, remedy = weight.ndim and len(weight) >= processes, "Or take launch.sharding=none."
        check_fit(fits, f"weight {name}", must, tuple(weight.shape), remedy)
    kinds = {kind for each in model.modules() for kind in getattr(each, "_no_split_modules", None) or ()}
    layers = [each for each in model.modules() if type(each).__name__ in kinds]
    if not layers:
        raise ConfigError(
            f"launch.sharding=fsdp2 divides a model layer by layer, and {type(model).__name__} does not name its "
            "layers; take launch.sharding=none."
        )
    policy = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    for layer in layers:
        fully_shard(layer, offload_policy=policy)
    fully_shard(model, offload_policy=policy)


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """Gather the weights in the first process, and return an empty dict in the others; all processes must call this."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


def _whole(value: Any, keep: bool) -> Any:
    """Gather a value of the optimizer state from all processes; return it on the CPU if `keep`, else None."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return (value.cpu() if isinstance(value, Tensor) else value) if keep else None


@contextmanager
def _reading(checkpoint: str | None) -> Iterator[None]:
    """Raise a `ModelError` for any error while reading a checkpoint, including torch's `CheckpointException`."""
    with resuming(checkpoint), warnings.catch_warnings():
        # A single process may read shards that several processes wrote.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield
        except CheckpointException as error:
            raise RuntimeError(next(f"{failed[0]}" for failed in error.failures.values())) from error


class ShardedTrainer(Trainer):
    """Part of `TurnTrainer` that shards the model over processes, and loads sharded checkpoints."""

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Tell accelerate that the model will be sharded, on CPUs too.

        Raises:
            ConfigError: If FSDP is configured in a way that accelerate would run as plain data parallelism.
        """
        super().create_accelerator_and_postprocess()
        state: Any = self.accelerator.state
        if self.args.fsdp and not self.is_fsdp_enabled:
            plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            version = plugin.fsdp_version
            check_fit(version == 2, "fsdp_config.version", "be 2 on CPUs", version)
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
            self.is_fsdp_enabled = True
        elif os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and not self.is_fsdp_enabled:
            raise ConfigError(
                "accelerate does not divide a model among CPUs, though its configuration asks for FSDP: it would train "
                "whole copies. Leave FSDP out of that configuration, and set launch.sharding=fsdp2 in a recipe or "
                "fsdp in TurnConfig."
            )

    @property
    def is_divided(self) -> bool:
        """Whether this trainer shards the model itself: with FSDP2, unless `auto_wrap_policy` is set."""
        plugin: Any = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        return plugin is not None and plugin.fsdp_version == 2 and plugin.auto_wrap_policy is None

    def _prepare_passes(self) -> None:
        """Check packed passes on the device of the model, then shard the model if this trainer shards models itself.

        With FSDP2 the whole model is on the CPU, so the check does not cover the attention kernel of the GPU.
        """
        prepare(self.model)
        if self.is_divided:
            offload = bool(self.args.fsdp_config.get("cpu_offload"))  # type: ignore[union-attr]
            divide(self.model, self.args.world_size, offload)

    def save_whole_optimizer(self, folder: Path | None) -> None:
        """Gather the optimizer state, and save it with the schedule, in the same files as a training in one process.

        All processes must call this.

        Args:
            folder: Folder to write, in the first process; None in the others.
        """
        found = self.optimizer.state_dict()
        keep = folder is not None
        found["state"] = {
            index: {name: _whole(value, keep) for name, value in of_weight.items()}
            for index, of_weight in found["state"].items()
        }
        if folder is not None:
            folder.mkdir(exist_ok=True)
            torch.save(found, folder / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        in_parts = (folder / _WEIGHTS).is_dir()
        with _reading(resume_from_checkpoint):
            if self.is_divided and not in_parts:
                self._load_whole_weights(folder)
            elif in_parts and not self.is_fsdp_enabled:
                whole = {"model": get_model_state_dict(self.model)}
                load(whole, storage_reader=FileSystemReader(folder / _WEIGHTS))
                set_model_state_dict(self.model, whole["model"])
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_whole_weights(self, folder: Path) -> None:
        """Read unsharded weights of a checkpoint, and keep this process's shard.

        Raises:
            ModelError: If the checkpoint holds adapters: the base weights of a sharded model have another data type.
        """
        if (folder / ADAPTER_SAFE_WEIGHTS_NAME).is_file():
            raise ModelError(
                f"checkpoint '{folder}' was written with base weights in float32, and launch.sharding=fsdp2 stores "
                "base weights in bfloat16; resume with launch.sharding=none, or remove the folder to start again."
            )
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        set_model_state_dict(self.model, whole, options=StateDictOptions(full_state_dict=True))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with _reading(checkpoint):
            folder = Path(checkpoint or "")
            if self.is_fsdp_enabled and checkpoint is not None and (folder / OPTIMIZER_NAME).is_file():
                self._load_whole_optimizer(folder)
            elif not self.is_fsdp_enabled and checkpoint is not None and (folder / _OPTIMIZER).is_dir():
                self._load_divided_optimizer(folder)
            else:
                super()._load_optimizer_and_scheduler(checkpoint)

    def _load_whole_optimizer(self, folder: Path) -> None:
        """Read an unsharded optimizer state of a checkpoint, and keep this process's shard."""
        found = torch.load(folder / OPTIMIZER_NAME, map_location="cpu", weights_only=True, mmap=True)
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        for index, of_weight in found["state"].items():
            like = weights[index]
            for name, value in of_weight.items():
                if isinstance(like, DTensor) and value.shape == like.shape:
                    layout = (like.device_mesh, like.placements)
                    of_weight[name] = distribute_tensor(value.to(like.device), *layout, src_data_rank=None)
        self.optimizer.load_state_dict(found)
        self._load_schedule(folder)

    def _load_divided_optimizer(self, folder: Path) -> None:
        """Read a sharded optimizer state that several processes wrote."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        whole = {"optimizer": get_optimizer_state_dict(self.model, optimizer)}
        load(whole, storage_reader=FileSystemReader(folder / _OPTIMIZER))
        set_optimizer_state_dict(self.model, optimizer, whole["optimizer"])
        self._load_schedule(folder)

    def _load_schedule(self, folder: Path) -> None:
        self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train for an epoch. After the last step of all, transformers resumes in its epoch, and would go on."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with resuming(checkpoint):
            super()._load_rng_state(checkpoint)
