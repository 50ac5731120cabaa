"""Keys and values of conversations, and attention that reads them where they lie.

The new tokens of all conversations go through a model's layers side by side, without padding; only attention tells
them apart. Each conversation's keys and values stay in a slot of its own (see `blocks.py`): nothing is copied when a
conversation joins a batch or leaves it. Conversations that have one new token each and lie side by side attend in one
call; any other attends alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from perturn.engines.local.blocks import Block, Blocks, Slot
from perturn.errors import ModelError

NAME = "perturn-history"
"""Name of our attention among transformers' implementations."""

_CALL_BYTES = 2**20
"""Keys and values of a layer that are read in about the time that a call takes besides."""

_PRODUCT_STEP = 64
"""Products of matrices attend over a multiple of so many tokens: each new shape has to be prepared."""


@dataclass(eq=False)
class History:
    """Tokens, keys and values of one conversation."""

    blocks: Blocks
    ids: list[int] = field(default_factory=list)
    """Tokens whose keys and values are held."""
    slot: Slot | None = None

    @property
    def nbytes(self) -> int:
        """Memory that is held."""
        return self.slot.block.slot_bytes if self.slot else 0

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens."""
        old = self.slot
        if old is not None and tokens <= old.block.capacity:
            return
        self.slot = self.blocks.take(tokens)
        if old is not None:
            _copy(old, self.slot, len(self.ids))


def _copy(old: Slot, new: Slot, tokens: int) -> None:
    for layer, pair in old.block.layers.items():
        for held, buffer in zip(pair, new.block.open(layer, *pair), strict=True):
            buffer[new.index, :, :tokens] = held[old.index, :, :tokens]


@dataclass(frozen=True, eq=False)
class Span:
    """The new tokens of one conversation in a batch."""

    history: History
    new: int


_PARTS: ContextVar[_Parts] = ContextVar("parts")


@contextmanager
def attending(spans: Sequence[Span], device: torch.device) -> Iterator[None]:
    """Within, a model whose attention is ours reads one row of tokens as the new tokens of several conversations.

    Afterwards the histories hold keys and values of the new tokens; their `ids` are the caller's to extend.
    """
    for span in spans:
        span.history.reserve(len(span.history.ids) + span.new)
    token = _PARTS.set(_Parts(spans, device))
    try:
        yield
    finally:
        _PARTS.reset(token)


class _Parts:
    """A batch's conversations, in the parts that attend."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        by_block: defaultdict[Block, list[tuple[int, Span]]] = defaultdict(list)
        self.parts: list[_Alone | _Together] = []
        first = 0
        for span in spans:
            assert span.history.slot is not None
            if span.new == 1:
                by_block[span.history.slot.block].append((first, span))
            else:
                self.parts.append(_Alone(first, span, device))
            first += span.new
        for block, members in by_block.items():
            self.parts += [_Together(block, run, device) for run in _runs(block, members)]
        rows = [row for part in self.parts for row in part.rows]
        order = sorted(range(len(rows)), key=rows.__getitem__)
        self.order = None if order == [*range(len(rows))] else torch.tensor(order, device=device)
        """Index of each row of the batch among the parts' rows; None: the same."""


def _runs(block: Block, members: list[tuple[int, Span]]) -> list[list[tuple[int, Span]]]:
    """A block's rows by slot, divided where reading what lies between takes longer than another call.

    Args:
        block: Whose slots they are.
        members: Each row of the batch, and its conversation.
    """
    ordered = sorted(members, key=lambda member: _index(member[1]))
    unread = max(len(span.history.ids) for _, span in members) * block.token_bytes
    runs = [ordered[:1]]
    for before, after in pairwise(ordered):
        if (_index(after[1]) - _index(before[1]) - 1) * unread > _CALL_BYTES:
            runs.append([])
        runs[-1].append(after)
    return runs


def _index(span: Span) -> int:
    assert span.history.slot is not None
    return span.history.slot.index


class _Masks:
    """Attention masks of the rows, made once for all layers of a pass with the same window."""

    def __init__(self, last: list[int], tokens: int, device: torch.device) -> None:
        """The rows.

        Args:
            last: Position of the last token that each row sees.
            tokens: That there are.
            device: To compute on.
        """
        self._last = torch.tensor(last, device=device)[:, None]
        self._tokens = tokens
        self._by_window: dict[int | None, Tensor] = {}

    def of(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """0 where a token is seen, else minus infinity [rows, tokens].

        Args:
            window: How many tokens a row sees at most; None: all.
            dtype: Of the scores.
        """
        if window not in self._by_window:
            key = torch.arange(self._tokens, device=self._last.device)
            hidden = key > self._last
            if window is not None:
                hidden |= key <= self._last - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._by_window[window] = mask.masked_fill_(hidden, -torch.inf)
        return self._by_window[window]


class _Alone:
    """One conversation with several new tokens."""

    def __init__(self, first: int, span: Span, device: torch.device) -> None:
        self.rows = range(first, first + span.new)
        self._slot = span.history.slot
        self._old = len(span.history.ids)
        total = self._old + span.new
        self._masks = _Masks(list(range(self._old, total)), total, device)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, scaling: float | None, window: int | None
    ) -> Tensor:
        """Keep the new keys and values, and attend: [1, heads, tokens, features] to [new, heads, features]."""
        assert self._slot is not None
        new, total = len(self.rows), self._old + len(self.rows)
        query, key, value = (each.narrow(2, self.rows.start, new) for each in (query, key, value))
        held = [each[self._slot.index] for each in self._slot.block.open(layer, key, value)]
        for kept, fresh in zip(held, (key, value), strict=True):
            kept[:, self._old : total] = fresh[0]
        keys, values = (each[:, None, :total] for each in held)
        heads, key_heads = query.shape[1], key.shape[1]
        causal = new == total and (window is None or total <= window)
        found = F.scaled_dot_product_attention(
            query[0].unflatten(0, (key_heads, -1)),
            keys.expand(-1, heads // key_heads, -1, -1),
            values.expand(-1, heads // key_heads, -1, -1),
            attn_mask=None if causal else self._masks.of(window, query.dtype),
            is_causal=causal,
            scale=scaling,
        )
        return found.flatten(0, 1).transpose(0, 1)


class _Together:
    """Conversations of one block with one new token each, by slot."""

    def __init__(self, block: Block, members: list[tuple[int, Span]], device: torch.device) -> None:
        self.rows = [row for row, _ in members]
        self._block = block
        slots = [_index(span) for _, span in members]
        lengths = [len(span.history.ids) for _, span in members]
        self._first, self._count = slots[0], slots[-1] - slots[0] + 1
        self._longest = max(lengths) + 1
        self._rounded = min(-(-self._longest // _PRODUCT_STEP) * _PRODUCT_STEP, block.capacity)
        # What lies between them and has no new token asks for a token too: the first of them, of its first key.
        asks, last = [self.rows[0]] * self._count, [0] * self._count
        for row, slot, length in zip(self.rows, slots, lengths, strict=True):
            asks[slot - self._first], last[slot - self._first] = row, length
        self._asks, self._slots, self._new, self._lengths = (
            torch.tensor(each, device=device) for each in (asks, slots, self.rows, lengths)
        )
        self._order = None if asks == self.rows else self._slots - self._first
        self._masks = _Masks(last, self._rounded, device)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, scaling: float | None, window: int | None
    ) -> Tensor:
        """Keep the new keys and values, and attend: [1, heads, tokens, features] to [new, heads, features]."""
        held = self._block.open(layer, key, value)
        for kept, fresh in zip(held, (key, value), strict=True):
            kept[self._slots, :, self._lengths] = fresh[0].index_select(1, self._new).transpose(0, 1)
        asking = query[0].index_select(1, self._asks).unflatten(0, (key.shape[1], -1)).permute(2, 0, 1, 3)
        # torch's kernel for CPUs takes four times as long for one row of bfloat16 as two products of matrices do.
        products = asking.shape[2] == 1 and query.dtype == torch.bfloat16 and query.device.type == "cpu"
        tokens = self._rounded if products else self._longest
        keys, values = (each.narrow(0, self._first, self._count).narrow(2, 0, tokens) for each in held)
        mask = self._masks.of(window, query.dtype)[:, None, None, :tokens]
        how = _by_products if products else F.scaled_dot_product_attention
        found = how(asking, keys, values, attn_mask=mask, scale=scaling).flatten(1, 2)
        return found if self._order is None else found.index_select(0, self._order)


def _by_products(
    query: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor, scale: float | None
) -> Tensor:
    """`scaled_dot_product_attention` for one row a head, with scores that are rounded to the type of the keys."""
    scaled = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = (keys @ scaled.transpose(-1, -2)).transpose(-1, -2) + attn_mask
    shares = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    return shares @ values


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
    parts = _PARTS.get(None)
    if parts is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    layer: Any = module.layer_idx
    found = [part.attend(query, key, value, layer, scaling, sliding_window) for part in parts.parts]
    output = found[0] if len(found) == 1 else torch.cat(found)
    return (output if parts.order is None else output.index_select(0, parts.order))[None], None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
