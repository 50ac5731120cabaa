"""Make the models of the benchmarks, with random weights. This module does without the other trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {  # hidden, layers, intermediate, heads, key heads; parameters without embeddings
    "0.9M": (128, 4, 384, 4, 4),
    "5M": (256, 6, 688, 4, 4),
    "15M": (384, 8, 1024, 6, 6),
    "135M": (576, 30, 1536, 9, 3),
    "360M": (960, 32, 2560, 15, 5),
    "1B": (2048, 16, 8192, 32, 8),
}


def threads() -> int:
    """Return the number of threads for matrix products."""
    return torch.get_num_threads()


def make_model(size: str, vocab: int) -> Any:
    """Return a Llama of one of `SIZES` with random weights."""
    return llama(SIZES[size], vocab, max_position_embeddings=8192)


def llama(shape: Sequence[int], vocab: int, **settings: Any) -> Any:
    """Return a Llama of random weights with tied embeddings, as in small models.

    Args:
        shape: Hidden size, layers, intermediate size, heads and key heads.
        vocab: Size of the vocabulary.
        settings: Further settings of `LlamaConfig`.
    """
    hidden, layers, intermediate, heads, key_heads = shape
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        tie_word_embeddings=True,
        **settings,
    )
    return LlamaForCausalLM(config)
