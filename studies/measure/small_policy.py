"""Make an untrained policy of a million parameters for a world: a tokenizer of its texts, and a Llama without lessons.

    python studies/measure/small_policy.py studies/measure/scienceworld.yaml start/scienceworld

The tokenizer is a byte-level BPE of the expert's episodes, so that it reads any text. The recipe's SFT teaches the rest.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from perturn.config.sections import Shape
from perturn.envs.load_environment import make_environment
from perturn.policy.models import new_model

TASKS = 60
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


def texts(section: dict[str, object]) -> Iterator[str]:
    """Yield what is said in episodes of the expert."""
    env = make_environment(section)
    try:
        for task in list(env.tasks("train"))[:: max(1, len(env.tasks("train")) // TASKS)]:
            seen = env.reset(task, 0)
            yield json.dumps(seen.tools)
            for action in env.expert(task):  # type: ignore[attr-defined]
                yield from (seen.text, *seen.results, action)
                if seen.terminated:
                    break
                seen = env.step(action)
            yield from (seen.text, *seen.results)
    finally:
        env.close()


def main(recipe: str, folder: str) -> None:
    """Write the tokenizer and the model."""
    section = yaml.safe_load(Path(recipe).read_text(encoding="utf-8"))["environment"]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts(section), vocab_size=2048, min_frequency=2, special_tokens=SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        additional_special_tokens=[SPECIAL[1]],
        chat_template=TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    torch.manual_seed(0)
    model = new_model(
        Shape(context=4096),
        len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters() / 1e6:.1f}M parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
