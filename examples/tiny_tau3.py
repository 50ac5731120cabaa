"""Make a tiny policy for `recipes/tau3_infopo_demo.yaml`: random weights of 5M parameters, with SmolLM2's tokenizer.

python examples/tiny_tau3.py tiny-tau3
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from perturn.chat.model_names import load_tokenizer

tokenizer = load_tokenizer("smollm2-135m", print)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    bos_token_id=tokenizer.bos_token_id,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
tokenizer.save_pretrained(sys.argv[1])
