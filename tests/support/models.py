"""Small real models."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def make_tiny_model(seed: int = 0) -> LlamaForCausalLM:
    """A Llama of two layers with random weights and SmolLM2's vocabulary."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=2,
        pad_token_id=2,
        bos_token_id=1,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()
