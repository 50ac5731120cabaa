"""Adapters in a folder of their own: load them upon their model, or merge them into it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from perturn.chat.model_names import adapters_in, from_pretrained, load_tokenizer
from perturn.config.sections import Lora
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
        say: Told what is done before anything slow starts.

    Returns:
        A `peft.PeftModel`.
    """
    found = adapters_in(name)
    assert found is not None
    transformers_logging.disable_progress_bar()
    base = from_pretrained("AutoModelForCausalLM", found.base, say, dtype=dtype).eval()
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
    return model.eval()


def load_to_train(name: str, new_adapters: bool, dropout: bool) -> Any:
    """Load a model by its name to train it.

    Args:
        name: As `load_model` takes it. The adapters of a folder are what is trained, unless new ones are added.
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
    model = load_adapters(name).merge_and_unload()
    model.save_pretrained(target)
    load_tokenizer(name).save_pretrained(target)


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
