"""Adapters in a folder of their own: write them, load them upon their model, or merge them into it."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from perturn.chat.model_names import adapters_in, is_local, load_tokenizer
from perturn.config.sections import Lora
from perturn.engines.adapter_files import CONFIG, WEIGHTS, adapter_config, low_rank
from perturn.errors import ModelError
from perturn.policy.models import disable_dropout, load_model

_logger = logging.getLogger(__name__)


def load_adapters(
    name: str,
    *,
    trainable: bool = False,
    dtype: torch.dtype = torch.float32,
    say: Callable[[str], None] = _logger.info,
) -> Any:
    """Load a model with the adapters of a folder upon it, in evaluation mode, on the CPU.

    Args:
        name: Folder of the adapters, which names their model.
        trainable: Whether to train the adapters, and they alone.
        dtype: Of the weights.
        say: Called with a message before slow work starts.

    Returns:
        A `peft.PeftModel`.
    """
    found = adapters_in(name)
    assert found is not None
    base = load_model(found.base, dtype=dtype, say=say)
    try:
        from peft import PeftModel

        with warnings.catch_warnings():
            # peft asks transformers by an old name
            warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
            model = PeftModel.from_pretrained(base, str(found.folder), is_trainable=trainable)
    except Exception as error:  # damaged files make errors of many types
        reason = " ".join(str(error).split())
        raise ModelError(
            f"the adapters in {name!r} cannot be loaded upon {found.base!r}: {type(error).__name__}: {reason:.500}"
        ) from error
    model.peft_config[
        "default"
    ].base_model_name_or_path = found.base  # peft looks for its config when it saves
    return model.eval()


def load_to_train(name: str, new_adapters: bool, dropout: bool) -> Any:
    """Load a model by its name to train it.

    Args:
        name: As `load_model` takes it. The adapters of a folder are trained, unless new ones are added.
        new_adapters: Whether adapters are added to the model.
        dropout: Whether it keeps its dropout.
    """
    further = adapters_in(name) is not None and not new_adapters
    model = load_adapters(name, trainable=True) if further else load_model(name)
    if not dropout:
        disable_dropout(model)
    return model


def merge(name: str, target: Path) -> None:
    """Write the model with the adapters of a folder merged into its weights, in float32, and the tokenizer.

    Args:
        name: Folder of the adapters.
        target: An empty folder.
    """
    load_model(name).save_pretrained(target)
    load_tokenizer(name).save_pretrained(target)


def save_adapters(model: Any, target: Path, start: str, further: bool = False) -> None:
    """Write adapters by themselves. If they were added to adapters of the same run, write both as one.

    Adding two adapters gives an adapter whose rank is the sum of both ranks. Its matrices are the matrices of both, one
    after the other, with the scales in the second matrix. So a folder of adapters always names a whole model, and the
    adapters are the sum of all trainings since.

    Args:
        model: A `peft.PeftModel`.
        target: Folder to write them into; its final name is next to the other policies of the run.
        start: Name or folder of the policy that the training began with.
        further: Whether the adapters of that policy were trained, and not new ones added to it.
    """
    from peft import get_peft_model_state_dict

    config = copy(model.peft_config["default"])
    found: dict[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    below = Path(start) if Path(start).parent.resolve() == target.parent.resolve() else None
    config.base_model_name_or_path = f"../{Path(start).name}" if below else _absolute(start)
    earlier = low_rank(below) if below and (below / CONFIG).is_file() else None
    if below and earlier:
        config.base_model_name_or_path = adapter_config(below)["base_model_name_or_path"]
        weights = {} if further else load_file(below / WEIGHTS)
        if any(each.any() for name, each in weights.items() if ".lora_B." in name):
            found = _beside(weights, earlier.scale, found, config.lora_alpha / config.r)
            config.r = config.lora_alpha = config.r + earlier.rank
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # a set has another order in each process
    config.inference_mode = True
    config.save_pretrained(target)
    model.config.save_pretrained(target)  # without it, peft looks for the config of the model at the Hub
    save_file(
        {name: each.contiguous().cpu() for name, each in found.items()}, target / WEIGHTS, {"format": "pt"}
    )


def _beside(
    first: Mapping[str, Tensor], scale: float, second: Mapping[str, Tensor], other: float
) -> dict[str, Tensor]:
    """Two adapters for the same layers as one with scale 1."""
    joined = {}
    for name, each in second.items():
        if ".lora_A." in name or name.endswith("_embedding_A"):
            joined[name] = torch.cat([first[name], each.cpu()])
        else:
            joined[name] = torch.cat([first[name] * scale, each.cpu() * other], dim=1)
    return joined


def _absolute(name: str) -> str:
    """Return a local folder as an absolute path; another name is not changed."""
    return os.path.abspath(os.path.expanduser(name)) if is_local(name) else name


def lora_config(settings: Lora) -> Any:
    """Turn a stage's adapters into peft's settings."""
    from peft import LoraConfig

    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=settings.target_modules,
        task_type="CAUSAL_LM",
    )
