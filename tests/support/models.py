"""Small real models and tokenizers."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 4096
"""Vocabulary size of a tiny policy, which knows the first tokens of SmolLM2."""


def make_tiny_model(seed: int = 0, vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    """Return a Llama of two layers with random weights and the first tokens of SmolLM2's vocabulary."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
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


def write_tiny_policy(folder: Path, tokenizer: PreTrainedTokenizerFast, vocabulary: int = VOCABULARY) -> Path:
    """Write a tiny policy that knows only the first tokens of a vocabulary, so that it loads and saves quickly."""
    make_tiny_model(vocabulary=vocabulary).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    known = {word: index for word, index in content["model"]["vocab"].items() if index < vocabulary}
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in content["model"]["merges"]]
    content["model"] |= {"vocab": known, "merges": [merge for merge in merges if "".join(merge) in known]}
    file.write_text(json.dumps(content))
    assert Tokenizer.from_file(str(file)).get_vocab_size() == vocabulary
    return folder
