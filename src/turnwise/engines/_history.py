"""Keys and values of conversations, and attention that reads them where they lie.

The new tokens of all conversations go through a model's layers side by side, without padding; only attention tells
them apart. Each conversation's keys and values stay in buffers of its own, which grow in place: nothing is copied when
a conversation joins a batch or leaves it, and a short one costs nothing for the length of another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from turnwise.errors import ModelError

NAME = "turnwise-history"
"""Name of our attention among transformers' implementations."""

_ROOM = 64
"""Buffers grow by a quarter, up to a multiple of so many tokens."""


def most_room(tokens: int) -> int:
    """The most tokens that buffers have room for when they have grown to hold so many."""
    return -(-(tokens + tokens // 4) // _ROOM) * _ROOM


@dataclass(eq=False)
class History:
    """What is kept of one conversation."""

    ids: list[int] = field(default_factory=list)
    """Tokens whose keys and values are held."""
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values by layer, each [1, key heads, room, features]."""
    room: int = 0
    """Tokens for which there is room."""

    @property
    def nbytes(self) -> int:
        """Memory that is held."""
        return sum(each.nbytes for pair in self.layers.values() for each in pair)

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens."""
        if tokens > self.room:
            wanted = max(tokens, self.room + self.room // 4)
            self.room = -(-wanted // _ROOM) * _ROOM
            for layer, (keys, values) in self.layers.items():
                self.layers[layer] = self._grown(keys), self._grown(values)

    def open(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The empty buffers of a layer, for keys and values of these shapes [1, key heads, tokens, features]."""
        self.layers[layer] = self._buffer(key), self._buffer(value)
        return self.layers[layer]

    def _buffer(self, like: Tensor) -> Tensor:
        return like.new_empty(1, like.shape[1], self.room, like.shape[3])

    def _grown(self, held: Tensor) -> Tensor:
        buffer = self._buffer(held)
        buffer[:, :, : len(self.ids)] = held[:, :, : len(self.ids)]
        return buffer


@dataclass(frozen=True, eq=False)
class Span:
    """The new tokens of one conversation in a batch."""

    history: History
    new: int

    def sees(self, window: int | None, device: torch.device) -> Tensor:
        """Which of the conversation's tokens each new one attends to [new tokens, tokens]."""
        new, old = self.new, len(self.history.ids)
        query = torch.arange(old, old + new, device=device)[:, None]
        key = torch.arange(old + new, device=device)
        return (key <= query) if window is None else (key <= query) & (key > query - window)


_SPANS: ContextVar[Sequence[Span]] = ContextVar("spans")


@contextmanager
def attending(spans: Sequence[Span]) -> Iterator[None]:
    """Within, a model whose attention is ours reads one row of tokens as the new tokens of several conversations.

    Afterwards the histories hold keys and values of the new tokens; their `ids` are the caller's to extend.
    """
    for span in spans:
        span.history.reserve(len(span.history.ids) + span.new)
    token = _SPANS.set(spans)
    try:
        yield
    finally:
        _SPANS.reset(token)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers calls it: [1, heads, tokens, features] to [1, tokens, heads, features].

    Raises:
        ModelError: If the layer asks for something that is not computed here.
    """
    asked = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if asked:
        raise ModelError(
            f"the local engine does not serve {type(module).__name__}: it asks for {', '.join(asked)}."
        )
    spans = _SPANS.get(None)
    if spans is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    lengths = [span.new for span in spans]
    held = _write(spans, module.layer_idx, key.split(lengths, 2), value.split(lengths, 2))  # type: ignore[arg-type]
    found = [
        _attend_one(each, *kept, span, scaling, sliding_window)
        for span, each, kept in zip(spans, query.split(lengths, 2), held, strict=True)
    ]
    return torch.cat(found)[None], None


def _write(
    spans: Sequence[Span], layer: int, key: Sequence[Tensor], value: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Add each conversation's new keys and values to what is held; views of all that is held then.

    One call writes them all: with many short spans, what counts is the number of calls.
    """
    places, held = [], []
    for span, new_key, new_value in zip(spans, key, value, strict=True):
        old = len(span.history.ids)
        keys, values = span.history.layers.get(layer) or span.history.open(layer, new_key, new_value)
        places += [keys.narrow(2, old, span.new), values.narrow(2, old, span.new)]
        held.append((keys.narrow(2, 0, old + span.new), values.narrow(2, 0, old + span.new)))
    torch._foreach_copy_(places, [each for pair in zip(key, value, strict=True) for each in pair])
    return held


def _attend_one(
    query: Tensor, keys: Tensor, values: Tensor, span: Span, scaling: float | None, window: int | None
) -> Tensor:
    """Attention of one conversation's new tokens: [1, heads, new, features] to [new, heads, features].

    The heads that share a key are rows of one product where there is one new token, else a batch.
    """
    _, key_heads, total, _ = keys.shape
    _, heads, new, _ = query.shape
    if new == 1:
        if window is not None and window < total:
            keys, values = (each.narrow(2, total - window, window) for each in (keys, values))
        grouped = query.view(1, key_heads, heads // key_heads, -1)
        return F.scaled_dot_product_attention(grouped, keys, values, scale=scaling).reshape(1, heads, -1)
    causal = new == total and (window is None or total <= window)
    found = F.scaled_dot_product_attention(
        query[0].unflatten(0, (key_heads, -1)),
        keys[0, :, None].expand(-1, heads // key_heads, -1, -1),
        values[0, :, None].expand(-1, heads // key_heads, -1, -1),
        attn_mask=None if causal else span.sees(window, query.device),
        is_causal=causal,
        scale=scaling,
    )
    return found.flatten(0, 1).transpose(0, 1)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
