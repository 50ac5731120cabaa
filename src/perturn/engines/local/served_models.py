"""Checks of models and prompts before the local engine serves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perturn.engines.prompt_failures import context_full
from perturn.errors import EngineFailure, ModelError

CHECK = 24
"""Number of tokens in the first of two passes that compare the engine with the model's own forward pass."""


@torch.inference_mode()
def words_alone(model: Any) -> list[tuple[list[int], Tensor]]:
    """Return two test sequences, each with the model's own log-probabilities of the next token.

    Returns:
        Pairs of token ids and log-probabilities, in nats [vocabulary].
    """
    size = min(model.get_output_embeddings().weight.shape[0], model.config.get_text_config().vocab_size)
    words = (torch.arange(2 * CHECK) * 7919 % size).tolist()
    found = []
    for ids in (words, words[5:]):
        inputs = torch.tensor([ids], device=model.device)
        found.append((ids, model(input_ids=inputs, use_cache=False).logits[0, -1].float().log_softmax(-1)))
    return found


def check_layers(model: Any) -> None:
    """Reject models whose attention cannot be replaced, or whose layers cache anything but keys and values.

    Raises:
        ModelError: If the engine cannot serve the model. The check does not read the weights.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    strange = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if strange or not getattr(model, "_supports_attention_backend", False):
        why = f"it has layers of type {', '.join(sorted(strange))}" if strange else "its attention is its own"
        raise ModelError(f"the local engine cannot serve {name}: {why}; take another model or engine.")


def why_not_answered(ids: Sequence[int], limit: int, vocabulary: int) -> EngineFailure | None:
    """Return the failure of a prompt that cannot be answered; None if it can be answered.

    Args:
        ids: Token ids of the prompt.
        limit: Longest sequence in tokens.
        vocabulary: Number of token embeddings of the model.
    """
    if len(ids) >= limit:
        return context_full(len(ids), limit)
    if max(ids) < vocabulary:
        return None
    return EngineFailure(
        f"the prompt has token {max(ids)}, and the model has embeddings for {vocabulary}; resize them to the "
        "tokenizer's size with resize_token_embeddings, and train the new ones."
    )
