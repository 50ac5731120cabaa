"""Reference log-probabilities: computed once without gradient, kept on disk by content hash."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from perturn.files import replacing
from perturn.policy.logprobs import action_logprobs
from perturn.policy.packing import by_budget, lay_out
from perturn.policy.tokens import Encoded

_log = logging.getLogger(__name__)

Track = Callable[[Iterable[Any]], Iterable[Any]]
"""Wraps an iterable to show progress."""


def reference_logprobs(
    model: Any,
    sequences: Sequence[Encoded],
    *,
    folder: Path,
    identity: str,
    token_budget: int = 4096,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    track: Track = iter,
) -> list[Tensor]:
    """Log-probabilities of every sequence's loss tokens under a frozen policy.

    Args:
        model: The reference, on the device to compute on.
        sequences: Trajectories as tokens.
        folder: Where results are kept; a second call with the same content reads them back.
        identity: Hash of the reference's weights and of the precision it runs in.
        token_budget: Tokens of one pass.
        precision: Context that sets the precision, such as autocast.
        track: Wraps the work to show progress.

    Returns:
        One tensor a sequence, in nats, float32 on the CPU [loss tokens].
    """
    file = folder / f"{_content_hash(sequences, identity)}.safetensors"
    found = _load(file)
    if found is None:
        was_training = model.training
        model.eval()
        with torch.no_grad(), precision():
            found = compute_logprobs(model, sequences, token_budget, track)
        model.train(was_training)
        _save(file, found)
    return found


def compute_logprobs(
    model: Any, sequences: Sequence[Encoded], token_budget: int = 4096, track: Track = iter
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


def _save(file: Path, logprobs: list[Tensor]) -> None:
    """Write the file whole or not at all."""
    lengths = torch.tensor([len(each) for each in logprobs])
    with replacing(file, foreign=(SafetensorError,)) as fresh:
        save_file({"logprobs": torch.cat(logprobs), "lengths": lengths}, fresh)


def _load(file: Path) -> list[Tensor] | None:
    """What a file holds, memory-mapped; None if there is none, or it is damaged, and it is to be made anew."""
    if not file.is_file():
        return None
    try:
        stored = load_file(file)
        return list(stored["logprobs"].split(stored["lengths"].tolist()))
    except (SafetensorError, OSError, KeyError, RuntimeError) as error:
        _log.warning("%s is damaged and made anew: %s: %s", file, type(error).__name__, error)
        return None


def _content_hash(sequences: Sequence[Encoded], identity: str) -> str:
    """Hash of everything the result depends on; the ids stand for both the text and the tokenizer."""
    digest = hashlib.blake2b(identity.encode(), digest_size=16)
    for sequence in sequences:
        digest.update(torch.tensor([sequence.ids, sequence.turn]).numpy().tobytes())
    return digest.hexdigest()
