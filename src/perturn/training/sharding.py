"""FSDP2: weights, gradients and optimizer of a training divided among processes, by torch's `fully_shard`.

accelerate treats processes on CPUs as plain data parallelism although FSDP is asked for, without a message. Here the
model is divided before accelerate sees it, on CPUs and on GPUs by the same lines.
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
from perturn.policy.models import resuming

_WEIGHTS, _OPTIMIZER = f"{FSDP_MODEL_NAME}_0", "optimizer_0"
"""Folders of a checkpoint of several processes that hold parts."""


def fsdp2(cpu_offload: bool) -> dict[str, Any]:
    """Return the settings of `TurnConfig` that divide the model among the processes.

    Args:
        cpu_offload: Keep the parts in the memory of the machine.
    """
    config = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", "auto_wrap_policy": "NO_WRAP"}
    return {"fsdp": True, "fsdp_config": {**config, "cpu_offload": cpu_offload}}


def divide(model: nn.Module, processes: int, cpu_offload: bool) -> None:
    """Divide the weights of a model among the processes, layer by layer.

    Args:
        model: With its adapters, where it has some; the same in all processes.
        processes: How many there are.
        cpu_offload: Keep the parts in the memory of the machine.

    Raises:
        ConfigError: If it cannot be divided.
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
    """Gather the weights in the first process; the others get none. All processes call this together."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


def _whole(value: Any, keep: bool) -> Any:
    """Return a tensor of an optimizer, gathered; None where it is not kept."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return (value.cpu() if isinstance(value, Tensor) else value) if keep else None


@contextmanager
def _reading(checkpoint: str | None) -> Iterator[None]:
    """Read a checkpoint in the block, with errors for the user, also where torch raises no `Exception`."""
    with resuming(checkpoint), warnings.catch_warnings():
        # One process may read what several have written.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield
        except CheckpointException as error:
            raise RuntimeError(next(f"{failed[0]}" for failed in error.failures.values())) from error


class ShardedTrainer(Trainer):
    """The part of `TurnTrainer` that divides the model among processes, and loads models that were divided."""

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Have accelerate know that the model will be divided, on CPUs too.

        Raises:
            ConfigError: If FSDP is asked for in a way that would end as plain data parallelism.
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
        """Whether this trainer divides the model itself: with FSDP2, unless a policy names the layers to wrap."""
        plugin: Any = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        return plugin is not None and plugin.fsdp_version == 2 and plugin.auto_wrap_policy is None

    def _divide(self) -> None:
        """Divide the model, if FSDP2 is asked for."""
        if self.is_divided:
            offload = bool(self.args.fsdp_config.get("cpu_offload"))  # type: ignore[union-attr]
            divide(self.model, self.args.world_size, offload)

    def save_whole_optimizer(self, folder: Path | None) -> None:
        """Gather the optimizer and write it with its schedule as one process does; all processes call this together.

        Args:
            folder: Where the first process writes; None in the others.
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
        """Read the weights of a training of whole copies, and keep this process's part.

        Raises:
            ModelError: If they are adapters, beneath which a divided model has other weights.
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
        """Read the optimizer that one process has written, or that was gathered, and keep this process's part."""
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
        """Read the parts of an optimizer that several processes have written."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        whole = {"optimizer": get_optimizer_state_dict(self.model, optimizer)}
        load(whole, storage_reader=FileSystemReader(folder / _OPTIMIZER))
        set_optimizer_state_dict(self.model, optimizer, whole["optimizer"])
        self._load_schedule(folder)

    def _load_schedule(self, folder: Path) -> None:
        self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with resuming(checkpoint):
            super()._load_rng_state(checkpoint)
