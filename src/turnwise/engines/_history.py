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


@dataclass(eq=False)
class History:
    """What is kept of one conversation."""

    ids: list[int] = field(default_factory=list)
    """Tokens whose keys and values are held."""
    _layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By layer [key heads, room, features], twice."""

    @property
    def nbytes(self) -> int:
        """Memory that is held."""
        return sum(each.nbytes for pair in self._layers.values() for each in pair)

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write what follows `ids` in one layer.

        Args:
            layer: Index of the layer.
            key: Of the new tokens [key heads, new tokens, features].
            value: Likewise.

        Returns:
            Keys and values of all tokens so far, as views.
        """
        old, end = len(self.ids), len(self.ids) + key.shape[1]
        held = self._layers.get(layer)
        if held is None or held[0].shape[1] < end:
            held = (_grown(held and held[0], key, old, end), _grown(held and held[1], value, old, end))
            self._layers[layer] = held
        keys, values = held
        keys[:, old:end] = key
        values[:, old:end] = value
        return keys[:, :end], values[:, :end]


def _grown(held: Tensor | None, new: Tensor, old: int, end: int) -> Tensor:
    """A buffer with room for `end` tokens and more, which begins with the `old` tokens that are held."""
    room = end if held is None else max(end, old + old // 4)
    buffer = new.new_empty(new.shape[0], -(-room // _ROOM) * _ROOM, new.shape[2])
    if held is not None:
        buffer[:, :old] = held[:, :old]
    return buffer


@dataclass(frozen=True, eq=False)
class Span:
    """The new tokens of one conversation in a batch."""

    history: History
    start: int
    stop: int

    def sees(self, window: int | None, device: torch.device) -> Tensor | None:
        """Which of the conversation's tokens each new one attends to [new tokens, tokens]; None: all of them."""
        new, old = self.stop - self.start, len(self.history.ids)
        if new == 1:
            return None
        query = torch.arange(old, old + new, device=device)[:, None]
        key = torch.arange(old + new, device=device)
        return (key <= query) if window is None else (key <= query) & (key > query - window)


_SPANS: ContextVar[Sequence[Span]] = ContextVar("spans")


@contextmanager
def attending(spans: Sequence[Span]) -> Iterator[None]:
    """Within, a model whose attention is ours reads one row of tokens as the new tokens of several conversations.

    Afterwards the histories hold keys and values of the new tokens; their `ids` are the caller's to extend.
    """
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
    layer: int = module.layer_idx  # type: ignore[assignment]
    output = query.new_empty(query.shape[2], query.shape[1], value.shape[-1])
    for span in spans:
        rows = slice(span.start, span.stop)
        keys, values = span.history.extend(layer, key[0, :, rows], value[0, :, rows])
        output[rows] = _attend_one(query[0, :, rows], keys, values, span, scaling, sliding_window)
    return output[None], None


def _attend_one(
    query: Tensor, keys: Tensor, values: Tensor, span: Span, scaling: float | None, window: int | None
) -> Tensor:
    """Attention of one conversation's new tokens: [heads, new, features] to [new, heads, features].

    The heads that share a key are rows of one product where there is one new token, else a batch.
    """
    key_heads, total, _ = keys.shape
    heads, new, _ = query.shape
    if new == 1:
        first = 0 if window is None else max(0, total - window)
        grouped = query.view(1, key_heads, heads // key_heads, -1)
        found = F.scaled_dot_product_attention(
            grouped, keys[None, :, first:], values[None, :, first:], scale=scaling
        )
        return found.reshape(1, heads, -1)
    groups = (key_heads, heads // key_heads)
    causal = new == total and (window is None or total <= window)
    found = F.scaled_dot_product_attention(
        query.unflatten(0, groups),
        keys[:, None].expand(-1, groups[1], -1, -1),
        values[:, None].expand(-1, groups[1], -1, -1),
        attn_mask=None if causal else span.sees(window, query.device),
        is_causal=causal,
        scale=scaling,
    )
    return found.flatten(0, 1).transpose(0, 1)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
