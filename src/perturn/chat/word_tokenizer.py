"""A tokenizer for the texts of one world, in which an object with its number is one token, and each text between two.

`Action: take mug 2 from desk 1` is `Action: take `, `mug 2`, ` from `, `desk 1`. So an episode has some 200 tokens,
where one of words has 390, and a model of a million parameters copies a name by attending to one token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from perturn.errors import ModelError

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
"""Only the policy's own turn is closed: an observation ends where the next role begins."""
_NUMBERED = re.compile(r"\b[a-z]+ \d+")


def make_tokenizer(texts: Iterable[str], context: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that knows every piece of these texts; of an object, all numbers up to the highest.

    Args:
        texts: Messages: observations, actions, instructions.
        context: Longest conversation of the model, in tokens.

    Raises:
        ModelError: If they name no object with its number, or one of them is not given back.
    """
    known = sorted(set(texts))
    highest: dict[str, int] = {}
    for kind, number in (each.split() for text in known for each in _NUMBERED.findall(text)):
        highest[kind] = max(int(number), highest.get(kind, 0))
    if not highest:
        raise ModelError(
            "the episodes name no object with its number, such as mug 2, so they are not made of such words."
        )
    kinds = "|".join(sorted(highest))
    pattern = rf"\b[a-z]+ \d+|\b(?:{kinds})\b"
    pieces = {piece for text in known for piece in _divide(pattern, text)}
    named = [f"{kind} {number}" for kind in sorted(highest) for number in range(1, highest[kind] + 1)]
    words = list(dict.fromkeys(chain(SPECIAL, sorted(highest), named, sorted(pieces))))
    found = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    found.pre_tokenizer = Split(Regex(pattern), "isolated")
    found.decoder = Fuse()
    for text in known:
        if found.decode(found.encode(text).ids, skip_special_tokens=False) != text:
            raise ModelError(f"the tokenizer of this world's words does not give back {text!r:.80}.")
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


def learn(model: Any, tokenizer: Any, texts: Iterable[str], seed: int) -> None:
    """Add texts that a tokenizer has no tokens for, one token each, and their embeddings, to a model.

    A tokenizer that reads any text learns nothing.

    Args:
        model: Its policy, which may have more rows then.
        tokenizer: It has a token for each of the texts from then on.
        texts: Such as a suffix with its line break.
        seed: Of the new embeddings.
    """
    unknown = [text for text in texts if tokenizer.unk_token_id in tokenizer(text)["input_ids"]]
    if not unknown:
        return
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in unknown])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)


def _divide(pattern: str, text: str) -> list[str]:
    return [piece for piece in re.split(f"({pattern})", text) if piece]
