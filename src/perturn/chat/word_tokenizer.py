"""A tokenizer for the texts of one environment: a numbered object is one token, and so is each text between objects.

`Action: take mug 2 from desk 1` becomes `Action: take `, `mug 2`, ` from `, `desk 1`. An episode then has about 200
tokens, compared with 390 for a tokenizer of words. A model of a million parameters can copy an object's name by
attending to one token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
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
"""Chat template. Only the policy's turns have an end token; an observation ends where the next role's token follows."""
_NUMBERED = re.compile(r"\b[a-z]+ \d+")


def make_tokenizer(texts: Iterable[str], context: int) -> PreTrainedTokenizerFast:
    """Build a tokenizer that covers the given texts, and for each kind of object all numbers up to the highest.

    Args:
        texts: Texts of messages: observations, actions and instructions.
        context: Context length of the model, in tokens.

    Raises:
        ModelError: If no text names a numbered object, or a text changes when it is encoded and decoded.
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
    made = tokenizer_of_words(words, pattern, context)
    found = made.backend_tokenizer
    for text in known:
        if found.decode(found.encode(text).ids, skip_special_tokens=False) != text:
            raise ModelError(f"the tokenizer of this world's words does not give back {text!r:.80}.")
    return made


def tokenizer_of_words(words: Sequence[str], pattern: str, context: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each word; all other text is unknown.

    Args:
        words: The words by token id, `SPECIAL` first.
        pattern: Regular expression by which a text is divided into words.
        context: Context length of the model, in tokens.
    """
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


def learn(model: Any, tokenizer: Any, texts: Iterable[str], seed: int) -> None:
    """Add a token for each text that a tokenizer cannot read, and enlarge the model's embeddings.

    A tokenizer that can read any text is not changed.

    Args:
        model: Model whose embeddings are enlarged.
        tokenizer: Tokenizer to which the tokens are added.
        texts: Texts that the tokenizer must be able to read, such as a suffix with its line break.
        seed: Seed of the new embeddings.
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
