"""A tokenizer for ALFWorld in which an object with its number, and each text between two objects, is one token.

`Action: take mug 2 from desk 1` is `Action: take `, `mug 2`, ` from `, `desk 1`. So an episode has some 200 tokens,
where one of words has 390, and a model of a million parameters copies a name by attending to one token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, SYSTEM, USER, ASSISTANT, END = SPECIAL = (
    "<|pad|>",
    "<|unknown|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
TEMPLATE = (
    "{%- for message in messages -%}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{%- if message['role'] == 'assistant' -%}{{ '<|end|>' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
"""Only the policy's own turn is closed: what it reads ends where the next role begins."""
_NUMBERED = re.compile(r"\b[a-z]+ \d+")


def make_tokenizer(texts: Iterable[str], context: int) -> PreTrainedTokenizerFast:
    """A tokenizer that knows every piece of these texts; of an object, all numbers up to the highest.

    Args:
        texts: Messages: observations, actions, instructions.
        context: Longest conversation of the model, in tokens.
    """
    known = set(texts)
    highest: dict[str, int] = {}
    for kind, number in (each.split() for text in known for each in _NUMBERED.findall(text)):
        highest[kind] = max(int(number), highest.get(kind, 0))
    kinds = "|".join(sorted(highest))
    pattern = rf"\b[a-z]+ \d+|\b(?:{kinds})\b"
    pieces = {piece for text in known for piece in _divide(pattern, text)}
    named = [f"{kind} {number}" for kind in sorted(highest) for number in range(1, highest[kind] + 1)]
    words = list(dict.fromkeys(chain(SPECIAL, sorted(highest), named, sorted(pieces))))
    found = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    found.pre_tokenizer = Split(Regex(pattern), "isolated")
    found.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=found,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path, texts: Sequence[str]) -> None:
    """Save a tokenizer, once it has given back every text."""
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise ValueError(f"the tokenizer does not give back {text!r}.")
    tokenizer.save_pretrained(folder)


def _divide(pattern: str, text: str) -> list[str]:
    return [piece for piece in re.split(f"({pattern})", text) if piece]
