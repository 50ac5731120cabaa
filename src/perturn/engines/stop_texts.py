"""Cut sampled tokens at a stop text, for engines that return tokens after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perturn.engines.protocol import Tokens


def until(tokens: Tokens, stop: Sequence[str], ids: list[int]) -> list[int]:
    """Return the shortest prefix of token ids whose text contains a stop text; all ids if none occurs."""
    if not stop or not any(text in tokens.text_of(ids) for text in stop):
        return ids
    lengths = range(1, len(ids) + 1)
    return next(ids[:n] for n in lengths if any(text in tokens.text_of(ids[:n]) for text in stop))
