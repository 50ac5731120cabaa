"""Make a tiny policy for tau3-bench's airline, from nothing: random weights, and a tokenizer of the domain's words.

    python examples/tiny_tau3.py tiny-tau3

SFT in `recipes/tau3_infopo_demo.yaml` teaches it the format of calls and little else. A run with it shows in minutes of
one core that the loop works.
"""

import json
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from perturn.envs.tau3.environment import Tau3

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

world = Tau3("airline")
texts = [world.system]
for task in world.tasks("train"):
    texts += [json.dumps(each) for each in world.reset(task).tools]
    world.step("Hello.")
    for action in world.expert(task):
        texts += [action, str(world.step(action).results)]

words = Tokenizer(models.BPE())
words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
words.train_from_iterator(
    texts, trainers.BpeTrainer(vocab_size=4096, special_tokens=SPECIAL, initial_alphabet=alphabet)
)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
torch.manual_seed(0)
shape = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
config = LlamaConfig(
    vocab_size=len(tokenizer), max_position_embeddings=8192, tie_word_embeddings=True, **shape, **ends
)
model = LlamaForCausalLM(config)
model.save_pretrained(sys.argv[1])
tokenizer.save_pretrained(sys.argv[1])
print(f"{sys.argv[1]}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")
