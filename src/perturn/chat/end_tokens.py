"""Tokens that end an answer: the end of turn of the template, and the end tokens of tokenizer and model."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from functools import cache
from typing import Any

_logger = logging.getLogger(__name__)


def declared_ends(model: Any) -> tuple[int, ...]:
    """Return the token ids with which a model says that it ends a text: `eos_token_id` of its generation config.

    Args:
        model: A causal language model of transformers. Where its generation config names none, its config counts.
    """
    generation, config = getattr(model, "generation_config", None), getattr(model, "config", None)
    for found in (generation, config.get_text_config() if config else None):
        ids = getattr(found, "eos_token_id", None)
        if ids is not None:
            return tuple(map(int, ids)) if isinstance(ids, list | tuple) else (int(ids),)
    return ()


def keep_ends(model: Any) -> None:
    """Write the tokens that end a text into a model's generation config where that names none.

    A `transformers.Trainer` puts the one end of the tokenizer there, and in the config, where several may stand.
    """
    generation = getattr(model, "generation_config", None)
    if generation is not None and generation.eos_token_id is None:
        generation.eos_token_id = list(declared_ends(model)) or None


def end_ids(
    tokenizer: Any, end_of_turn: int, special_ids: Collection[int], declared: Iterable[int]
) -> frozenset[int]:
    """Return all token ids that end an answer.

    Args:
        tokenizer: A Hugging Face tokenizer; its end of text is one of them.
        end_of_turn: The token with which the chat template ends a turn of the policy.
        special_ids: Special and added tokens of the tokenizer.
        declared: What the model says (`declared_ends`). Ordinary tokens among them, and ids that the tokenizer does not
            have, are logged and left out: an answer would be cut at a word.
    """
    declared, known = set(declared), set(special_ids)
    if strange := declared - known:
        tokens = [
            tokenizer.convert_ids_to_tokens(each) for each in sorted(strange) if 0 <= each < len(tokenizer)
        ]
        _warn(str(tokenizer.name_or_path), tuple(sorted(strange)), ", ".join(map(repr, tokens)))
    ends = {end_of_turn, *(declared & known)}
    return frozenset(ends if tokenizer.eos_token_id is None else ends | {tokenizer.eos_token_id})


@cache
def _warn(name: str, ids: tuple[int, ...], tokens: str) -> None:
    """Say once that a model names ordinary tokens as its end."""
    _logger.warning(
        "the model names token ids %s%s as the end of a text, but they are no special tokens of the tokenizer %r; "
        "answers do not end there. Correct eos_token_id in the model's generation_config.json.",
        ", ".join(map(str, ids)),
        f" ({tokens})" if tokens else "",
        name,
    )
