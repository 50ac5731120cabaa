"""Fixtures of engines."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from support.vllm import CONTEXT


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A Llama whose heads are of a size that vLLM knows on a CPU; its embeddings are tied, as in small models."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        initializer_range=0.15,
        tie_word_embeddings=True,
    )
    found = tmp_path_factory.mktemp("models") / "random"
    LlamaForCausalLM(config).save_pretrained(found)
    tokenizer.save_pretrained(found)
    return found
