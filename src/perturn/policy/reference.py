"""Reference log-probabilities: computed once without gradient, kept on disk under a hash of all they depend on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from perturn.data.cache import evict, reference_bytes, remove_abandoned
from perturn.io.writing import replacing
from perturn.policy.logprobs import action_logprobs, exact_length
from perturn.policy.models import config_digest, tensors_digest, weights_digest
from perturn.policy.packing import by_budget, lay_out
from perturn.policy.tokens import NO_TURN, Encoded
from perturn.settings.recipe import TOKEN_BUDGET

_logger = logging.getLogger(__name__)

Track = Callable[[Iterable[Any]], Iterable[Any]]
"""Wraps an iterable to show progress."""

Precision = Callable[[], AbstractContextManager[Any]]
"""Makes a context that sets the precision, such as autocast."""

_PROBE = 256
"""Tokens that every reference is asked for, to tell it from others."""


def reference_identity(model: Any, precision: Precision = nullcontext) -> str:
    """Hash of all that decides a policy's log-probabilities: equal identities are equal references.

    What it says of a few fixed tokens shows what no list of settings would: adapters, hooks, kernels. Beside it stand
    weights, buffers and settings, which may matter to other tokens alone, and versions.

    Args:
        model: The reference, on the device to compute on; it is prepared for packed sequences.
        precision: That it will run in.
    """
    with _frozen(model, precision):
        device = model.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        (probe,) = compute_logprobs(model, [_probe(model)])
    parts = [
        *(sys.modules["perturn"].__version__, torch.__version__, transformers.__version__),
        *(device, str(model.dtype), str(autocast)),
        tensors_digest({"probe": probe, **dict(model.named_buffers())}),
        *(weights_digest(model), config_digest(model), _settings(model)),
    ]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def reference_logprobs(
    model: Any,
    sequences: Sequence[Encoded],
    *,
    folder: Path,
    identity: str,
    token_budget: int = TOKEN_BUDGET,
    precision: Precision = nullcontext,
    track: Track = iter,
) -> list[Tensor]:
    """Log-probabilities of every sequence's loss tokens under a frozen policy.

    Args:
        model: The reference, on the device to compute on.
        sequences: Trajectories as tokens.
        folder: Where results are kept; a second call with the same content reads them back. Files that are damaged are
            made again, and those used longest ago go where all take more than `perturn.data.cache.reference_bytes`.
        identity: From `reference_identity`.
        token_budget: Tokens of one pass.
        precision: That it is to run in, as the identity was made.
        track: Wraps the work to show progress.

    Returns:
        One tensor a sequence, in nats, float32 on the CPU [loss tokens].
    """
    file = folder / f"{_content_hash(sequences, identity)}.reference.safetensors"
    stored = _read(file)
    if stored is not None:
        return stored
    most = reference_bytes()
    with _frozen(model, precision):
        logprobs = compute_logprobs(model, sequences, token_budget, track)
    _save(file, logprobs)
    evict(folder, "*.reference.safetensors", most, keep=file)
    remove_abandoned(folder, ".*.reference.safetensors.*.partial")
    return _read(file) or logprobs  # from the file they need no memory


def compute_logprobs(
    model: Any, sequences: Sequence[Encoded], token_budget: int = TOKEN_BUDGET, track: Track = iter
) -> list[Tensor]:
    """Log-probabilities of every sequence's loss tokens, computed pack by pack.

    Args:
        model: A causal language model on the device to compute on.
        sequences: Trajectories as tokens.
        token_budget: Tokens of one pass.
        track: Wraps the work to show progress.

    Returns:
        One tensor a sequence, in nats, float32 on the CPU [loss tokens].
    """
    found: dict[int, Tensor] = {}
    for pack in track(by_budget([[sequence] for sequence in sequences], token_budget)):
        batch = {
            name: tensor.to(model.device) for name, tensor in lay_out([sequences[i] for i in pack]).items()
        }
        logprobs = action_logprobs(model, batch).float().cpu()
        lengths = batch["sequence"].bincount(minlength=len(pack)).tolist()
        found |= zip(pack, logprobs.split(lengths), strict=True)
    return [found[index] for index in range(len(sequences))]


@contextmanager
def _frozen(model: Any, precision: Precision) -> Iterator[None]:
    """Within, the model computes without gradient and dropout, in a precision."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), precision():
            yield
    finally:
        model.train(was_training)


def _probe(model: Any) -> Encoded:
    """Tokens from all of the vocabulary, as many as the model computes."""
    size = min(model.get_output_embeddings().weight.shape[0], model.config.get_text_config().vocab_size)
    length = min(_PROBE, exact_length(model) or _PROBE)
    ids = (torch.arange(length) * 7919 % size).tolist()
    return Encoded(tuple(ids), (NO_TURN, *(0,) * (length - 1)), ("user",) * length)


def _settings(model: torch.nn.Module) -> str:
    """The plain attributes of all layers, such as scales and what is switched on; a model's own are its config."""
    found = {
        name: {
            key: value
            for key, value in vars(layer).items()
            if key not in ("training", "_is_hf_initialized")
            and not key.startswith("perturn_")
            and _is_plain(value)
        }
        for name, layer in model.named_modules()
        if not isinstance(layer, transformers.PreTrainedModel)
    }
    return json.dumps(found, sort_keys=True, default=lambda words: sorted(words, key=repr))


def _is_plain(value: object) -> bool:
    """Whether a value is made of numbers and words alone."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def _save(file: Path, logprobs: list[Tensor]) -> None:
    """Write the file whole or not at all, with a hash of what it holds."""
    held = {
        "logprobs": torch.cat(logprobs),
        "lengths": torch.tensor([len(each) for each in logprobs]),
    }
    with replacing(file, foreign=(SafetensorError,)) as fresh:
        save_file(held, fresh, metadata={"check": _check(file, held)})


def _check(file: Path, held: dict[str, Tensor]) -> str:
    """Metadata of a file of that name and content."""
    return f"{file.name} {tensors_digest(held)}"


def _read(file: Path) -> list[Tensor] | None:
    """Contents of the file, memory-mapped; None if there is none, or if it is damaged, which is logged."""
    try:
        with safe_open(file, "pt") as opened:
            said = opened.metadata()
        held = load_file(file)
        damaged = said != {"check": _check(file, held)}
        why = "its content has another hash than was written"
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError, ValueError) as error:
        damaged, why = True, f"{type(error).__name__}: {error}"
    if damaged:
        _logger.warning("%s is damaged (%s); the reference is computed again.", file, why)
        return None
    with suppress(OSError):  # evicted by now, or in a cache that others keep and we only read
        os.utime(file)
    return list(held["logprobs"].split(held["lengths"].tolist()))


def _content_hash(sequences: Sequence[Encoded], identity: str) -> str:
    """Hash of everything the result depends on; the ids stand for both the text and the tokenizer."""
    digest = hashlib.blake2b(identity.encode(), digest_size=16)
    for sequence in sequences:
        digest.update(torch.tensor([len(sequence.ids), *sequence.ids, *sequence.turn]).numpy().tobytes())
    return digest.hexdigest()
