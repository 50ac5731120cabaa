"""Load a model from a Hub id, a local folder, or a bundled model; adapters; hashes; where and in which type it runs."""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.utils import logging as transformers_logging

from perturn.chat.control_tokens import declared_ends
from perturn.chat.model_names import adapters_in, from_pretrained, load_config, load_tokenizer, model_help
from perturn.chat.tokens import Renderer
from perturn.config.sections import Shape
from perturn.engines import Loaded
from perturn.engines.local.weight_files import copy_weights, stored_weights
from perturn.errors import (
    ConfigError,
    ModelError,
    PerturnError,
    check_belongs,
    check_fit,
    check_known,
    required,
)
from perturn.rotary import too_long, usable_length
from perturn.table import guarded, locate, require_library

_logger = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16")

WORTH_BFLOAT16 = 256
"""Hidden size from which a CPU that multiplies bfloat16 is faster with it; below, conversions cost more than they save
(docs/internals/training.md)."""


def tokenizer_of(model: Any, given: Any = None) -> Any:
    """Return the tokenizer of a model, by the name that the model was loaded from.

    Args:
        model: A name, or a transformers model.
        given: A tokenizer to return instead; None: the model's own.

    Raises:
        ConfigError: If it is not a model, or does not record what it was loaded from.
    """
    config = getattr(model, "config", None)
    name = model if isinstance(model, str) else config and config.name_or_path
    must = "be a Hub id, a folder or a transformers model, or to play an Engine"
    check_fit(name is not None, "a model", must, model)
    if given is not None:
        return given
    reader = "the model does not say what it was loaded from"
    return load_tokenizer(required(name or None, "a tokenizer", reader, "give it as tokenizer="))


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
    """Return causal language model in evaluation mode, on the CPU.

    Args:
        name: A Hub id, a local folder, or a bundled name such as `smollm2-135m`. Adapters are merged into their model.
        dtype: Of the weights.
        say: Called with a message before slow work starts.

    Raises:
        ModelError: If there is no such model; one line with the places that were tried.
    """
    transformers_logging.disable_progress_bar()
    found = adapters_in(name)
    if found is None:
        return from_pretrained("AutoModelForCausalLM", name, say, dtype=dtype).eval()
    model = load_model(found.base, dtype=dtype, say=say)
    stored = stored_weights(name, model, dtype, found.beneath)
    if stored is None:
        model = locate("perturn.policy.adapters:load_adapters")(name, say=say).merge_and_unload().to(dtype)
    else:
        copy_weights(model, stored, stored.adapted)
    model.name_or_path = model.config.name_or_path = name  # later adapters name this folder
    return model


def empty_model(name: str) -> Any:
    """Return causal language model without weights, by the same names as `load_model`: its layers alone, on no device.

    Raises:
        ModelError: If there is no such model.
    """
    config = load_config(name)
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config)
        except ValueError as error:
            reason = str(error).strip().splitlines()[0]
            raise ModelError(
                f"model {name!r} is not a causal language model: {reason} {model_help()}"
            ) from error


def new_model(shape: Shape, vocabulary: int, **tokens: Any) -> Any:
    """Return a Llama with weights drawn at random, by torch's own generator; input and output layer are one.

    Args:
        shape: Its size.
        vocabulary: Words of its tokenizer.
        tokens: Special ones, such as `pad_token_id`.
    """
    transformers_logging.disable_progress_bar()
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            intermediate_size=shape.mlp,
            max_position_embeddings=shape.context,
            tie_word_embeddings=True,
            vocab_size=vocabulary,
            bos_token_id=None,
            **tokens,
        )
    )


def load_policy(
    path: str, *, policy: str, dtype: str, template: str | None, say: Callable[[str], None]
) -> Loaded:
    """Load a policy with its weights into this process, for the engines that need them.

    Args:
        path: Folder or Hub id.
        policy: Its name in the run.
        dtype: The setting `model.dtype`.
        template: Text of the chat template, if it is not the tokenizer's own.
        say: Called with a message before slow work starts.
    """
    where = device()
    kind = compute_dtype(dtype, where, load_config(path))
    model = load_model(path, dtype=kind, say=say)
    tokens = Renderer(load_tokenizer(path), template, ends=declared_ends(model))
    check_vocabulary(model, tokens.tokenizer, tokens.probe_ids, f"chat template of {path}")
    return Loaded(
        model=model,
        tokens=tokens,
        name=f"{policy}@{_digest(path, model, kind)[:12]}",
        device=where.type,
        dtype=str(kind).removeprefix("torch."),
        context=context_length(model),
    )


def load_tokens(path: str, template: str | None) -> tuple[Renderer, int | None]:
    """Load the tokenizer and template of a policy, and the context of its model, without its weights.

    Args:
        path: Folder or Hub id.
        template: Text of the chat template, if it is not the tokenizer's own.
    """
    model = empty_model(path)
    with suppress(OSError):  # it has no file of its own for that
        model.generation_config = GenerationConfig.from_pretrained(path)
    tokens = Renderer(load_tokenizer(path), template, ends=declared_ends(model))
    check_vocabulary(model, tokens.tokenizer, tokens.probe_ids, f"chat template of {path}")
    return tokens, context_length(model)


def add_adapters(model: Any, peft_config: Any, seed: int) -> Any:
    """Wrap the model; equal seeds give equal adapters.

    Args:
        model: A causal language model; it may have no weights (`empty_model`).
        peft_config: What peft adds.
        seed: Of the adapters' first weights.

    Raises:
        ConfigError: If peft is missing or cannot add adapters, if a named module does not exist, or if the output layer
            would get one.
    """
    require_library("peft", "peft_config", "lora")
    from peft import PeftModel, get_peft_model

    remedy = "leave it out to train the model's own adapters, or call model.merge_and_unload() first"
    plain = not isinstance(model, PeftModel)
    check_belongs({"peft_config": True}, plain, "a model without adapters", remedy)
    wanted = getattr(peft_config, "target_modules", None)
    with guarded("adapters cannot be added"), torch.random.fork_rng(), warnings.catch_warnings():
        # peft asks transformers by an old name
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
        torch.manual_seed(seed)
        adapted = get_peft_model(model, peft_config)
    if isinstance(
        wanted, list | tuple | set
    ):  # peft passes over a name that no module has, where another one matches
        found = adapted.targeted_module_names
        missing = [name for name in wanted if not any(f".{each}".endswith(f".{name}") for each in found)]
        known = sorted({each.rpartition(".")[2] for each in found})
        for name in sorted(missing):
            check_known(name, known, f"target_modules names {name!r}, which the model does not have")
    if hasattr(adapted.get_output_embeddings(), "base_layer"):
        raise ConfigError(
            "the output layer gets an adapter, which packed training would pass over; take it out of target_modules, "
            "or train all of it with modules_to_save."
        )
    return adapted


def vocabulary(model: Any) -> int:
    """Return the number of tokens that a model has embeddings for, often rounded up from its tokenizer's number."""
    read, written = model.get_input_embeddings(), model.get_output_embeddings()
    # By what the layers say: a weight that is divided among processes has another shape.
    sizes = [getattr(read, "num_embeddings", None) or read.weight.shape[0]]
    if written is not None:
        sizes.append(getattr(written, "out_features", None) or written.weight.shape[0])
    return int(min(sizes))


def check_vocabulary(model: Any, tokenizer: Any, ids: Iterable[int], where: str) -> None:
    """Reject tokens that a model has no embedding for, such as those that were added to its tokenizer alone.

    A tokenizer may have more tokens than the model, as long as they do not occur.

    Args:
        model: A causal language model, which may have no weights.
        tokenizer: Its tokenizer.
        ids: Tokens that occur.
        where: What they are tokens of, for the error.
    """
    size = vocabulary(model)
    strange = min((token for token in ids if token >= size), default=None)
    if strange is not None:
        raise ModelError(
            f"{where}: token {strange} ({tokenizer.decode([strange])!r:.80}) has no embedding: the tokenizer has "
            f"{len(tokenizer)} tokens and the model {size}. Call model.resize_token_embeddings(len(tokenizer)) before "
            "the model is trained or saved, or use the tokenizer that the model was made with."
        )


def context_length(model: Any) -> int | None:
    """Return longest sequence the model is used for, in tokens; None if it does not say.

    That is the length it was made for, or less if its positions depend on the length beyond that, which is logged.
    """
    made_for = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limit = usable_length(model.config)
    if limit is not None and limit != made_for:
        _logger.warning(
            "the model's context is %d tokens, not %s: %s", limit, made_for, too_long(model.config)
        )
    return limit


def weights_digest(model: torch.nn.Module) -> str:
    """Return the content hash of the weights, as `save_pretrained` would write them."""
    return tensors_digest(model.state_dict())


def _digest(path: str, model: Any, kind: torch.dtype) -> str:
    """Content hash of a policy that is loaded; adapters are hashed as files, and not as merged weights."""
    found = adapters_in(path)
    return weights_digest(model) if found is None else found.identity(str(kind))


def new_identity(policy: str, folder: str, served: str, dtype: str) -> str | None:
    """Return the identity of a policy as `load_policy` would name it, if an engine can switch to it; drop its weights.

    Args:
        policy: Its name in the run.
        folder: What `save_pretrained` wrote, or adapters.
        served: `architecture` of the policy that is served.
        dtype: The setting `model.dtype`, of both.

    Returns: None if it is another architecture than the served one, or stored in another way.
    """
    model = empty_model(folder)
    kind = compute_dtype(dtype, device(), model.config)
    found = adapters_in(folder)
    stored = stored_weights(folder, model, kind, None if found is None else found.beneath)
    if config_digest(model) != served or stored is None:
        return None
    digest = tensors_digest(stored) if found is None else found.identity(str(kind))
    return f"{policy}@{digest[:12]}"


def architecture(name: str) -> str:
    """Return the content hash of everything but the weights that decides a policy's outputs."""
    return config_digest(empty_model(name))


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the content hash of names, types, shapes and values."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        data = tensor.detach().cpu().contiguous()
        digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def config_digest(model: Any) -> str:
    """Return the content hash of everything that decides a model's outputs, except its weights and their type."""
    settings = {
        key: value
        for key, value in model.config.to_dict().items()
        if key not in ("_name_or_path", "transformers_version", "architectures", "use_cache", "dtype")
    }
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def device() -> torch.device:
    """Return where models run: the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def fast_bfloat16(device: torch.device) -> bool:
    """Return whether the device multiplies bfloat16 matrices in hardware."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":  # torch offers no public question for this
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False


def compute_dtype(dtype: str, device: torch.device, config: Any | None) -> torch.dtype:
    """Turn the `dtype` setting into the type to compute in.

    `auto` chooses bfloat16 if the hardware supports it, except on a CPU for models that are too narrow to gain from it.

    Args:
        dtype: The setting.
        device: Where the model runs.
        config: Of the model; None: it is not known yet, nor narrow.
    """
    if dtype not in DTYPES:
        raise ModelError(f"model.dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    if dtype != "auto":
        return torch.bfloat16 if dtype == "bfloat16" else torch.float32
    narrow = (
        config is not None and device.type == "cpu" and config.get_text_config().hidden_size < WORTH_BFLOAT16
    )
    return torch.bfloat16 if fast_bfloat16(device) and not narrow else torch.float32


def disable_dropout(model: torch.nn.Module) -> None:
    """Take the model's dropout away; adapters keep theirs."""
    for where, module in model.named_modules():
        if ".lora_dropout." in where:
            continue
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():  # attention layers keep theirs as a number
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


@contextmanager
def resuming(checkpoint: str | None) -> Iterator[None]:
    """Read a checkpoint in the block; the libraries that read it say in many ways that it is damaged."""
    try:
        yield
    except PerturnError:
        raise
    except Exception as error:
        raise ModelError(
            f"checkpoint {checkpoint!r} cannot be read: {type(error).__name__}: {error} Remove that folder; training "
            "then goes on from an earlier one, or begins anew."
        ) from error
