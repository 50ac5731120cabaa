"""Memory of the KV cache: blocks with one buffer per layer, shared by conversations of similar length.

One attention call then serves all conversations of a block. This saves time if the model is small and each
conversation has one new token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain, count
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import functional as F

from perturn.engines.local.prefix_tree import Beginning

_STEP = 64
"""Capacities are multiples of this number of tokens."""
_SLOTS = 16
"""Number of slots of a block on a CPU, where unwritten memory takes no space."""
_MOST_SLOTS = 64
"""Largest number of slots of a block on other devices."""
_PARTS = 8
"""Smallest number of blocks that fit into the cache on other devices, where a block takes its full memory at once."""
_NUMBERS = count()


def capacity_for(tokens: int) -> int:
    """Return the smallest capacity of a slot that holds a number of tokens.

    Each capacity is about 1.5 times the next smaller capacity.
    """
    capacity = _STEP
    while capacity < tokens:
        capacity = -(-(capacity + capacity // 2) // _STEP) * _STEP
    return capacity


def slots_of(device: str, budget: int, token_bytes: int, capacity: int) -> int:
    """Return the number of slots of a block.

    Args:
        device: Type of the device, such as `cpu`.
        budget: Size of the KV cache in bytes.
        token_bytes: Bytes of one token's keys and values in all layers.
        capacity: Number of tokens of a slot.
    """
    if device == "cpu":
        return _SLOTS
    return min(max(budget // (_PARTS * capacity * token_bytes), 1), _MOST_SLOTS)


class Block:
    """Buffers for keys and values, with a slot for each of several conversations."""

    def __init__(self, slots: int, capacity: int) -> None:
        """Make an empty block with `slots` slots of `capacity` tokens each."""
        self.capacity = capacity
        self.number = next(_NUMBERS)
        """Number of the block, in order of creation."""
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values by layer, each [slots, key heads, capacity, features]."""
        self.slots, self._bytes = slots, 0
        self.free = list(range(slots))
        self._ever = 0  # slots with a smaller index have been used before

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in all layers."""
        return self._bytes // self.slots

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.slot_bytes // (self.capacity * max(1, len(self.layers)))

    def take(self) -> Slot:
        """Return the first free slot.

        A slot that is used for the first time is filled with zeros, so that masked attention reads no NaN.
        """
        index = min(self.free)
        self.free.remove(index)
        if index == self._ever:
            self._ever += 1
            for each in chain(*self.layers.values()):
                each[index] = 0.0
        return Slot(self, index)

    def open(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the buffers of a layer, which are created on the first call.

        Args:
            layer: Index of the layer.
            key: Keys [1, key heads, tokens, features], for shape, data type and device.
            value: Values [1, key heads, tokens, features], for shape, data type and device.
        """
        if layer not in self.layers:
            self.layers[layer] = self._buffer(key), self._buffer(value)
            self._bytes += sum(each.nbytes for each in self.layers[layer])
        return self.layers[layer]

    def _buffer(self, like: Tensor) -> Tensor:
        buffer = like.new_empty(self.slots, like.shape[1], self.capacity, like.shape[3])
        buffer[: self._ever] = 0.0
        return buffer


class Slot:
    """One conversation's part of a block; it becomes free as soon as no reference to it is left."""

    def __init__(self, block: Block, index: int) -> None:
        """Make a slot; call `Block.take` instead."""
        self.block, self.index = block, index

    def __del__(self) -> None:
        """Mark the slot as free."""
        self.block.free.append(self.index)


class Blocks:
    """All blocks in use, by the capacity of their slots."""

    def __init__(self, slots: Callable[[int], int]) -> None:
        """Make an empty cache.

        Args:
            slots: Function that returns the number of slots of a block from its capacity in tokens.
        """
        self._slots = slots
        self._blocks: defaultdict[int, WeakSet[Block]] = defaultdict(WeakSet)

    def take(self, tokens: int) -> Slot:
        """Return a free slot for a number of tokens, in the fullest block; among equally full blocks, the oldest."""
        capacity = capacity_for(tokens)
        blocks = self._blocks[capacity]
        unfilled = [block for block in blocks if block.free]
        block = min(unfilled, key=lambda block: (len(block.free), block.number), default=None)
        if block is None:
            block = Block(self._slots(capacity), capacity)
            blocks.add(block)
        return block.take()


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Ask(NamedTuple):
    """Parameters of an attention call: layer, scale of the scores, sliding window, and whether sums are needed."""

    layer: int
    scaling: float | None
    window: int | None
    sums: bool
    """Whether the log-sum-exps of the attention scores are needed too."""


def masks(last: Sequence[int], tokens: int, device: torch.device) -> Callable[..., Tensor]:
    """Return a function that makes attention masks and caches them for all layers of a forward pass.

    A mask is 0 where a query may attend to a key, and minus infinity elsewhere [queries, keys].

    Args:
        last: For each query, the index of the last key that it may attend to.
        tokens: Number of keys.
        device: Device of the masks.

    Returns:
        Function that returns a mask. Its arguments are the sliding window in tokens (None: no window), the data type,
        and the number of copies of the queries.
    """
    ends = torch.tensor(last, device=device)[:, None]

    @cache
    def mask(window: int | None, dtype: torch.dtype, times: int = 1) -> Tensor:
        key = torch.arange(tokens, device=device)
        hidden = key > ends
        if window is not None:
            hidden |= key <= ends - window
        return (
            torch.zeros(hidden.shape, dtype=dtype, device=device)
            .masked_fill_(hidden, -torch.inf)
            .repeat(times, 1)
        )

    return mask


def dot_products(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, ask: Ask
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with torch's kernel.

    Args:
        query: Queries [batch, heads, queries, features].
        keys: Keys [batch, heads, keys, features].
        values: Values [batch, heads, keys, features].
        mask: Added to the scores; None: attention is causal.
        ask: Parameters of the call.

    Returns:
        Attention outputs [batch, heads, queries, features]. Log-sum-exps of the scores [batch, heads, queries], or
        None if `ask.sums` is False.
    """
    if ask.sums:
        found, sums = _flash(query, keys, values, 0.0, mask is None, attn_mask=mask, scale=ask.scaling)
        return found, sums
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=mask is None, scale=ask.scaling
    ), None


def by_products(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, ask: Ask
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with two matrix products; arguments and results as in `dot_products`.

    This is for few queries per head. The scores are rounded to the data type of the keys.
    """
    scaled = query * (query.shape[-1] ** -0.5 if ask.scaling is None else ask.scaling)
    scores = (keys @ scaled.transpose(-1, -2)).transpose(-1, -2) + mask
    shares = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    return shares @ values, scores.float().logsumexp(-1) if ask.sums else None


class Shared:
    """Attention of a batch's tokens to the keys and values of one shared node."""

    def __init__(
        self, node: Beginning, readers: Sequence[tuple[int, int]], tokens: int, device: torch.device
    ) -> None:
        """Store the node's keys and values, and prepare the masks for its readers.

        Args:
            node: The shared node.
            readers: For each token that attends to the node, its index in the batch and in its conversation.
            tokens: Number of tokens in the batch.
            device: Device of the computation.
        """
        start = sum(each.tokens for each in node.path[:-1])
        last = [index - start for _, index in readers]
        self._held, self._tokens = node.held, node.tokens
        everyone = len(readers) == tokens
        self._rows = None if everyone else torch.tensor([row for row, _ in readers], device=device)
        self._nearest, self._farthest = min(last), max(last)
        self._mask = masks(last, node.tokens, device)

    def join(self, query: Tensor, found: Tensor, sums: Tensor, ask: Ask) -> tuple[Tensor, Tensor]:
        """Merge attention to the node into attention to other keys, weighted by the log-sum-exps.

        Args:
            query: Queries [1, heads, tokens, features].
            found: Attention outputs over the other keys [tokens, heads, features].
            sums: Log-sum-exps of the other scores [tokens, heads].
            ask: Parameters of the call.

        Returns:
            Attention outputs [tokens, heads, features] and log-sum-exps [tokens, heads] over all these keys.
        """
        window = ask.window
        if window is not None and self._nearest - window >= self._tokens - 1:
            return found, sums
        rows = self._rows
        mask = None if window is None or self._farthest < window else self._mask(window, query.dtype)
        own, own_sums = (found, sums) if rows is None else (found[rows], sums[rows])
        more, more_sums = self._attend(query[0] if rows is None else query[0][:, rows], mask, ask)
        if mask is not None:  # the window of a token may exclude the whole node
            more_sums = more_sums.masked_fill(mask[:, -1:].isneginf(), -torch.inf)
        share = (more_sums - own_sums).sigmoid()[..., None]
        joined = torch.lerp(own.float(), more.float(), share.float()).to(found.dtype)
        total = torch.logaddexp(own_sums, more_sums)
        if rows is None:
            return joined, total
        return found.index_copy(0, rows, joined), sums.index_copy(0, rows, total)

    def _attend(self, query: Tensor, mask: Tensor | None, ask: Ask) -> tuple[Tensor, Tensor]:
        """Compute attention to the node alone, from queries [heads, tokens, features].

        Returns:
            Attention outputs [tokens, heads, features] and log-sum-exps [tokens, heads].
        """
        keys, values = self._held[ask.layer]
        tokens, wide = query.shape[1], (len(keys), -1)
        asking = query.unflatten(0, wide).flatten(1, 2)[None]
        if mask is not None:
            mask = mask.repeat(asking.shape[2] // tokens, 1)[None, None]
        found, sums = _flash(asking, keys[None], values[None], 0.0, False, attn_mask=mask, scale=ask.scaling)
        found, sums = (each[0].unflatten(1, (-1, tokens)).flatten(0, 1) for each in (found, sums))
        return found.transpose(0, 1), sums.T


def in_order(parts: Sequence[Tensor | None], order: Tensor | None) -> Tensor | None:
    """Concatenate the results of the parts along their tokens, in the order of the batch.

    Args:
        parts: Result of each attention call [tokens of the call, ...]; all None if the calls have no such result.
        order: Index of each token of the batch among the concatenated tokens; None: the same order.
    """
    if parts[0] is None:
        return None
    whole = parts[0] if len(parts) == 1 else torch.cat([part for part in parts if part is not None])
    return whole if order is None else whole.index_select(0, order)
