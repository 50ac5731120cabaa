"""Load a model from a Hub id, a local folder, or a bundled model; hash weights; where and in which type it runs."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from perturn.errors import ModelError
from perturn.policy.names import from_pretrained, load_config, model_help
from perturn.rope import too_long, usable_length

_logger = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16")


def dequantize(source: Path, file: str, target: Path) -> None:
    """Write a GGUF checkpoint as float32 safetensors with its tokenizer."""
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    # A model loaded from GGUF refuses to be saved, so its weights move into a plain one.
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, gguf_file=file))
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def load_model(
    name: str, *, dtype: torch.dtype = torch.float32, say: Callable[[str], None] = _logger.info
) -> Any:
    """Causal language model in evaluation mode, on the CPU.

    Args:
        name: A Hub id, a local folder, or a bundled name such as `smollm2-135m`.
        dtype: Of the weights.
        say: Told what is done before anything slow starts.

    Raises:
        ModelError: If there is no such model; one line that says what was tried.
    """
    transformers_logging.disable_progress_bar()
    return from_pretrained("AutoModelForCausalLM", name, say, dtype=dtype).eval()


def empty_model(name: str, say: Callable[[str], None] = _logger.info) -> Any:
    """Causal language model without weights, by the same names as `load_model`: its layers alone, on no device.

    Raises:
        ModelError: If there is no such model.
    """
    config = load_config(name, say)
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config)
        except ValueError as error:
            reason = str(error).strip().splitlines()[0]
            raise ModelError(
                f"model {name!r} is no causal language model: {reason} {model_help()}"
            ) from error


def context_length(model: Any) -> int | None:
    """Longest sequence the model is used for, in tokens; None if it does not say.

    That is what it was made for, or less where its positions depend on the length beyond that, which is logged.
    """
    made_for = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limit = usable_length(model.config)
    if limit is not None and limit != made_for:
        _logger.warning(
            "the model's context is %d tokens, not %s: %s", limit, made_for, too_long(model.config)
        )
    return limit


def weights_digest(model: torch.nn.Module) -> str:
    """Content hash of the weights, as `save_pretrained` would write them."""
    return tensors_digest(model.state_dict())


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Content hash of names, types, shapes and values."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        data = tensor.detach().cpu().contiguous()
        digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def config_digest(model: Any) -> str:
    """Content hash of what decides a model's outputs beside its weights and their type."""
    settings = {
        key: value
        for key, value in model.config.to_dict().items()
        if key not in ("_name_or_path", "transformers_version", "architectures", "use_cache", "dtype")
    }
    return hashlib.blake2b(
        json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=16
    ).hexdigest()


def device() -> torch.device:
    """Where models run: the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def fast_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices in hardware."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":  # torch offers no public question for this
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False


def compute_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The `dtype` setting -> the type to compute in; `auto` takes bfloat16 where the hardware has it."""
    if dtype not in DTYPES:
        raise ModelError(f"model.dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    if dtype == "auto":
        return torch.bfloat16 if fast_bfloat16(device) else torch.float32
    return torch.bfloat16 if dtype == "bfloat16" else torch.float32
