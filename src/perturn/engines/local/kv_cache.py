"""KV cache of each conversation, and attention that reads it in place.

The new tokens of all conversations pass through the model as one row without padding; only attention separates the
conversations. The keys and values of a conversation stay in its slot (see `cache_blocks.py`), so nothing is copied when
a conversation joins or leaves the batch. Conversations of one block with few new tokens share an attention call. Each
other conversation has a call of its own.

The keys and values of a shared prefix may stay in common memory (see `prefix_tree.py`). All conversations then attend
to the prefix in one matrix product. Their attention to prefix and slot is merged by the log-sum-exps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from perturn.engines.local.cache_blocks import (
    Ask,
    Block,
    Blocks,
    Shared,
    Slot,
    by_products,
    dot_products,
    in_order,
    masks,
)
from perturn.engines.local.prefix_tree import Beginning
from perturn.errors import ModelError

NAME = "perturn-history"
"""Name of our attention among transformers' implementations."""

CALL_BYTES = 2**20
"""Bytes of keys and values that a CPU reads in about the fixed time of one attention call."""

_OTHER_CALL_BYTES = 2**28
"""Bytes that other devices read in the fixed time of one call: 90 microseconds at 3 TB/s, or ten kernel launches."""

_WIDTHS, _OTHER_WIDTHS = (8,), (8, 64)
"""Limits of new tokens by group of conversations that share an attention call, on a CPU and on other devices."""

_PAIRS = 2**25
"""Most pairs of a new and a cached token in a shared call; a mask in bfloat16 has 64 MB for each head of a key head."""

_PRODUCT_STEP = 64
"""Matrix products are padded to a multiple of this number of tokens, because each new shape costs setup time."""


@dataclass(eq=False)
class History:
    """Tokens, keys and values of one conversation."""

    blocks: Blocks
    ids: list[int] = field(default_factory=list)
    """Tokens whose keys and values are cached."""
    slot: Slot | None = None
    end: Beginning | None = None
    """Last node of the conversation's first prompt in the prefix tree."""
    apart: Beginning | None = None
    """Last node that is read from common memory; keys and values of later tokens are in the slot."""

    @property
    def nbytes(self) -> int:
        """Bytes of the conversation's slot."""
        return self.slot.block.slot_bytes if self.slot else 0

    @property
    def tokens_apart(self) -> int:
        """Number of tokens whose keys and values are in common memory instead of the slot."""
        return sum(node.tokens for node in self.apart.path) if self.apart else 0

    @property
    def path_apart(self) -> list[Beginning]:
        """Nodes that are read from common memory."""
        return self.apart.path if self.apart else []

    def reserve(self, tokens: int) -> Slot:
        """Return a slot with room for `tokens` tokens; if a new slot is needed, copy the keys and values into it."""
        old = self.slot
        if old is not None and tokens <= old.block.capacity:
            return old
        self.slot = new = self.blocks.take(tokens)
        if old is not None:
            kept = len(self.ids) - self.tokens_apart
            for layer, pair in old.block.layers.items():
                for held, buffer in zip(pair, new.block.open(layer, *pair), strict=True):
                    buffer[new.index, :, :kept] = held[old.index, :, :kept]
        return new

    def cut_to(self, ids: list[int], most: int) -> bool:
        """Drop cached tokens that differ from a new prompt; return whether the cache can be used for the prompt.

        The cache is unusable if too many tokens would be dropped, or none would be left in the slot.

        Args:
            ids: Token ids of the prompt; at least its last token is left to feed.
            most: Largest number of tokens that may be dropped.
        """
        same = len(self.ids)
        if same >= len(ids) or ids[:same] != self.ids:
            both = zip(self.ids, ids[:-1], strict=False)
            same = next((at for at, (own, its) in enumerate(both) if own != its), min(same, len(ids) - 1))
        if len(self.ids) - same > most or same <= self.tokens_apart:
            return False
        del self.ids[same:]  # their keys and values are overwritten later
        return True

    def begin(self, path: Sequence[Beginning], apart: int) -> None:
        """Start the conversation with a shared prefix.

        Args:
            path: Nodes of the prefix, in order, with computed keys and values.
            apart: Number of first nodes to read from common memory; the later nodes are copied into the slot.
        """
        self.apart = path[apart - 1] if apart else None
        self.ids = [token for node in path[:apart] for token in node.ids]
        start = 0
        for node in path[apart:]:
            stop = start + node.tokens
            slot = self.reserve(stop)
            for layer, pair in node.held.items():
                buffers = slot.block.open(layer, *(each[None] for each in pair))
                for buffer, held in zip(buffers, pair, strict=True):
                    buffer[slot.index, :, start:stop] = held
            self.ids += node.ids
            start = stop

    def computed(self) -> dict[int, list[Tensor]]:
        """Return the keys and values in the slot by layer, each [key heads, tokens, features]."""
        assert self.slot is not None
        index, kept = self.slot.index, len(self.ids) - self.tokens_apart
        return {
            layer: [each[index, :, :kept] for each in pair] for layer, pair in self.slot.block.layers.items()
        }


@dataclass(frozen=True, eq=False)
class _Span:
    """New tokens of one conversation in a batch."""

    row: int
    """Index of the first new token in the batch."""
    old: int
    """Number of tokens that the slot already holds."""
    new: int
    slot: Slot

    @property
    def total(self) -> int:
        return self.old + self.new


@dataclass(frozen=True, eq=False)
class _Plan:
    """Attention calls of a batch."""

    parts: list[_Alone | _Together]
    """Attention calls to keys and values in the conversations' slots."""
    order: Tensor | None
    """Index of each token of the batch among the concatenated tokens of `parts` [tokens]; None: the same order."""
    shared: list[Shared]
    """Attention calls to keys and values in common memory."""


_PLAN: ContextVar[_Plan] = ContextVar("plan")


@contextmanager
def attending(batch: Sequence[tuple[History, int]], device: torch.device) -> Iterator[None]:
    """Let a model with the attention `NAME` read one row of tokens as new tokens of several conversations.

    After a forward pass in this context, the histories hold keys and values of the new tokens. The caller must append
    the new tokens to their `ids`.

    Args:
        batch: Histories of the conversations, each with its number of new tokens, in the order of the row.
        device: Device of the computation.
    """
    spans: list[_Span] = []
    readers: defaultdict[Beginning, list[tuple[int, int]]] = defaultdict(list)
    for history, new in batch:
        row, index = spans[-1].row + spans[-1].new if spans else 0, len(history.ids)
        old = index - history.tokens_apart
        spans.append(_Span(row, old, new, history.reserve(old + new)))
        for node in history.path_apart:
            readers[node] += [(row + each, index + each) for each in range(new)]
    parts = _divide(spans, device)
    rows = [row for part in parts for row in part.rows]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    same = order == [*range(len(rows))]
    shared = [Shared(node, those, len(rows), device) for node, those in readers.items()]
    token = _PLAN.set(_Plan(parts, None if same else torch.tensor(order, device=device), shared))
    try:
        yield
    finally:
        _PLAN.reset(token)


def _divide(spans: Sequence[_Span], device: torch.device) -> list[_Alone | _Together]:
    """Divide a batch into attention calls: one per conversation with many new tokens, others per block and group."""
    widths = _WIDTHS if device.type == "cpu" else _OTHER_WIDTHS
    parts: list[_Alone | _Together] = [_Alone(each, device) for each in spans if each.new > widths[-1]]
    groups: defaultdict[tuple[Block, int], list[_Span]] = defaultdict(list)
    for span in spans:
        if span.new <= widths[-1]:
            groups[span.slot.block, bisect_left(widths, span.new)].append(span)
    for (block, _), members in groups.items():
        parts += [_Together(block, run, device) for run in _runs(block, members, device)]
    return parts


def _runs(block: Block, members: list[_Span], device: torch.device) -> list[list[_Span]]:
    """Divide a block's conversations, sorted by slot, into attention calls.

    Two neighbours are in different calls if reading the unused slots between them takes longer than another call, or if
    the call would have too many pairs of tokens.
    """
    ordered = sorted(members, key=lambda span: span.slot.index)
    unread = max(span.old for span in members) * block.token_bytes
    most = CALL_BYTES if device.type == "cpu" else _OTHER_CALL_BYTES
    slots = _PAIRS // (max(span.new for span in members) * block.capacity)
    runs = [ordered[:1]]
    for before, after in pairwise(ordered):
        gap = after.slot.index - before.slot.index - 1
        if gap * unread > most or after.slot.index - runs[-1][0].slot.index >= slots:
            runs.append([])
        runs[-1].append(after)
    return runs


class _Alone:
    """Attention call of one conversation with many new tokens."""

    def __init__(self, span: _Span, device: torch.device) -> None:
        self.rows: Sequence[int] = range(span.row, span.row + span.new)
        self._span = span
        self._mask = masks(range(span.old, span.total), span.total, device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, ask: Ask) -> tuple[Tensor, Tensor | None]:
        """Store the new keys and values in the slot, and compute attention.

        Args:
            query: Queries of the whole batch [1, heads, tokens, features].
            key: Keys of the whole batch [1, key heads, tokens, features].
            value: Values of the whole batch [1, key heads, tokens, features].
            ask: Parameters of the call.

        Returns:
            Attention outputs [new, heads, features]; log-sum-exps [new, heads], or None if `ask.sums` is False.
        """
        span, total = self._span, self._span.total
        query, key, value = (each.narrow(2, span.row, span.new) for each in (query, key, value))
        held = [each[span.slot.index] for each in span.slot.block.open(ask.layer, key, value)]
        for kept, fresh in zip(held, (key, value), strict=True):
            kept[:, span.old : total] = fresh[0]
        wide = (key.shape[1], query.shape[1] // key.shape[1])
        if span.old == 0 and (ask.window is None or total <= ask.window):
            asking, mask = query[0].unflatten(0, wide), None
            keys, values = (each[:, None, :total].expand(-1, wide[1], -1, -1) for each in held)
        else:  # heads that share a key head become further queries, which takes 0.7 of the time in bfloat16
            asking = query.unflatten(1, wide).flatten(2, 3)
            mask = self._mask(ask.window, query.dtype, wide[1])
            keys, values = (each[None, :, :total] for each in held)
        found, sums = dot_products(asking, keys, values, mask, ask)
        found = found.reshape(query.shape[1], span.new, -1).transpose(0, 1)
        return found, None if sums is None else sums.reshape(query.shape[1], span.new).T


class _Together:
    """Attention call of several conversations of one block with few new tokens each, sorted by slot."""

    def __init__(self, block: Block, members: list[_Span], device: torch.device) -> None:
        self.rows: Sequence[int] = [row for span in members for row in range(span.row, span.row + span.new)]
        self._block = block
        self._first, count = members[0].slot.index, members[-1].slot.index - members[0].slot.index + 1
        self._count, self._width = count, max(span.new for span in members)
        self._longest = max(span.total for span in members)
        self._rounded = min(-(-self._longest // _PRODUCT_STEP) * _PRODUCT_STEP, block.capacity)
        # Every slot gets `width` queries. Missing queries repeat the slot's last token. Slots without new tokens, which
        # lie between the others, repeat the first token of all.
        asks, last = [self.rows[0]] * (count * self._width), [0] * (count * self._width)
        order: list[int] = []
        slots: list[int] = []
        lengths: list[int] = []
        for span in members:
            start = (span.slot.index - self._first) * self._width
            order += range(start, start + span.new)
            slots += [span.slot.index] * span.new
            lengths += range(span.old, span.total)
            for index in range(self._width):
                asks[start + index] = span.row + min(index, span.new - 1)
                last[start + index] = span.old + min(index, span.new - 1)
        self._asks, self._slots, self._new, self._lengths = (
            torch.tensor(each, device=device) for each in (asks, slots, self.rows, lengths)
        )
        self._order = None if asks == self.rows else torch.tensor(order, device=device)
        self._mask = masks(last, self._rounded, device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, ask: Ask) -> tuple[Tensor, Tensor | None]:
        """Store the new keys and values in the slots, and compute attention; see `_Alone.attend`."""
        held = self._block.open(ask.layer, key, value)
        for kept, fresh in zip(held, (key, value), strict=True):
            kept[self._slots, :, self._lengths] = fresh[0].index_select(1, self._new).transpose(0, 1)
        key_heads, shared = key.shape[1], query.shape[1] // key.shape[1]
        asking = query[0].index_select(1, self._asks).view(key_heads, shared, self._count, self._width, -1)
        # [slots, key heads, their heads * width, features]
        asking = asking.permute(2, 0, 1, 3, 4).flatten(2, 3)
        # For one query in bfloat16, torch's CPU kernel takes four times as long as two matrix products.
        on_cpu = query.device.type == "cpu"
        products = asking.shape[2] == 1 and query.dtype == torch.bfloat16 and on_cpu
        # GPU kernels copy a mask unless each of its rows starts at a multiple of 8 numbers.
        tokens = self._rounded if products or not on_cpu else self._longest
        keys, values = (each.narrow(0, self._first, self._count).narrow(2, 0, tokens) for each in held)
        mask = self._mask(ask.window, query.dtype)[:, :tokens].view(self._count, 1, 1, self._width, tokens)
        mask = mask.expand(-1, -1, shared if self._width > 1 else 1, -1, -1).flatten(2, 3)
        how = by_products if products else dot_products
        found, sums = how(asking, keys, values, mask, ask)
        return self._by_token(found, shared), None if sums is None else self._by_token(sums, shared)

    def _by_token(self, found: Tensor, shared: int) -> Tensor:
        """Reorder results [slots, key heads, heads per key head * width, ...] to [new, heads, ...]."""
        each: Tensor = found.unflatten(2, (shared, -1)).movedim(3, 1).flatten(2, 3).flatten(0, 1)
        return each if self._order is None else each.index_select(0, self._order)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with the signature that transformers expects of an attention function.

    Inside `attending`, one row of tokens is read as tokens of several conversations; elsewhere, attention is `sdpa`.

    Args:
        module: Attention layer of the model.
        query: Queries [1, heads, tokens, features].
        key: Keys [1, key heads, tokens, features].
        value: Values [1, key heads, tokens, features].
        attention_mask: Mask, used only outside `attending`.
        scaling: Factor of the scores; None: 1 / sqrt(features).
        sliding_window: Number of newest tokens that a token attends to; None: all.
        others: Other arguments of transformers.

    Returns:
        Attention outputs [1, tokens, heads, features], and None for the attention weights.

    Raises:
        ModelError: If the layer asks for a kind of attention that the engine does not support.
    """
    asked = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if asked:
        raise ModelError(
            f"the local engine does not serve {type(module).__name__}: it asks for {', '.join(asked)}."
        )
    plan = _PLAN.get(None)
    if plan is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    layer: Any = module.layer_idx
    ask = Ask(layer, scaling, sliding_window, bool(plan.shared))
    attended = [part.attend(query, key, value, ask) for part in plan.parts]
    found, sums = (in_order(each, plan.order) for each in zip(*attended, strict=True))
    for each in plan.shared:
        assert found is not None
        assert sums is not None
        found, sums = each.join(query, found, sums, ask)
    assert found is not None
    return found[None], None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
