"""Memory for keys and values: conversations of about one length side by side in a block, one buffer a layer.

One call then attends for all of them, which matters when each has one new token and the model is small.
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
"""Slots of a block on a CPU, where memory is only used once it is written."""
_MOST_SLOTS = 64
"""Slots of a block on other devices, at most."""
_PARTS = 8
"""Blocks that the memory for keys and values has room for there, at least: a block's memory is taken at once."""
_NUMBERS = count()


def capacity_for(tokens: int) -> int:
    """Return the smallest capacity of a slot for this number of tokens; each capacity is 1.5 times the one before."""
    capacity = _STEP
    while capacity < tokens:
        capacity = -(-(capacity + capacity // 2) // _STEP) * _STEP
    return capacity


def slots_of(device: str, budget: int, token_bytes: int, capacity: int) -> int:
    """Return how many conversations lie side by side in a block.

    Args:
        device: Type of the device.
        budget: Bytes for all keys and values.
        token_bytes: Bytes of a token's keys and values in all layers.
        capacity: Tokens of a slot.
    """
    if device == "cpu":
        return _SLOTS
    return min(max(budget // (_PARTS * capacity * token_bytes), 1), _MOST_SLOTS)


class Block:
    """Buffers of several conversations, each of which has a slot in them."""

    def __init__(self, slots: int, capacity: int) -> None:
        """Make an empty block for a number of conversations, each of a number of tokens."""
        self.capacity = capacity
        self.number = next(_NUMBERS)
        """A block made later has a larger one."""
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values by layer, each [slots, key heads, capacity, features]."""
        self.slots, self._bytes = slots, 0
        self.free = list(range(slots))
        self._ever = 0  # slots before this one have been given out

    @property
    def slot_bytes(self) -> int:
        """Memory of one slot."""
        return self._bytes // self.slots

    @property
    def token_bytes(self) -> int:
        """Memory of one token in one layer."""
        return self.slot_bytes // (self.capacity * max(1, len(self.layers)))

    def take(self) -> Slot:
        """Return the first free slot; unwritten parts of it are zero, so that they can be attended to and masked."""
        index = min(self.free)
        self.free.remove(index)
        if index == self._ever:
            self._ever += 1
            for each in chain(*self.layers.values()):
                each[index] = 0.0
        return Slot(self, index)

    def open(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the buffers of a layer, made for keys and values of these shapes [1, key heads, tokens, features]."""
        if layer not in self.layers:
            self.layers[layer] = self._buffer(key), self._buffer(value)
            self._bytes += sum(each.nbytes for each in self.layers[layer])
        return self.layers[layer]

    def _buffer(self, like: Tensor) -> Tensor:
        buffer = like.new_empty(self.slots, like.shape[1], self.capacity, like.shape[3])
        buffer[: self._ever] = 0.0
        return buffer


class Slot:
    """One conversation's part of a block; free again as soon as it is released."""

    def __init__(self, block: Block, index: int) -> None:
        """Make a slot; only `Block.take` does so."""
        self.block, self.index = block, index

    def __del__(self) -> None:
        """Give the slot back."""
        self.block.free.append(self.index)


class Blocks:
    """All blocks that somebody holds a slot of, by size."""

    def __init__(self, slots: Callable[[int], int]) -> None:
        """Make an empty cache.

        Args:
            slots: How many conversations a block holds, from its capacity in tokens.
        """
        self._slots = slots
        self._blocks: defaultdict[int, WeakSet[Block]] = defaultdict(WeakSet)

    def take(self, tokens: int) -> Slot:
        """Return a slot for this number of tokens, in the oldest block with most conversations."""
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
    """The other methods that a layer calls."""

    layer: int
    scaling: float | None
    window: int | None
    sums: bool
    """Whether the log-sum-exps of scores are needed too."""


def masks(last: Sequence[int], tokens: int, device: torch.device) -> Callable[..., Tensor]:
    """Make masks, once for all layers of a pass: 0 up to the last token that a row sees, else minus infinity."""
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
    """Return attention by torch's kernel, causal without a mask, and the scores' log-sum-exps if asked for."""
    if ask.sums:
        found, sums = _flash(query, keys, values, 0.0, mask is None, attn_mask=mask, scale=ask.scaling)
        return found, sums
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=mask is None, scale=ask.scaling
    ), None


def by_products(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, ask: Ask
) -> tuple[Tensor, Tensor | None]:
    """Return attention for one row a head, with scores that are rounded to the type of the keys."""
    scaled = query * (query.shape[-1] ** -0.5 if ask.scaling is None else ask.scaling)
    scores = (keys @ scaled.transpose(-1, -2)).transpose(-1, -2) + mask
    shares = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    return shares @ values, scores.float().logsumexp(-1) if ask.sums else None


class Shared:
    """All tokens whose conversations go on from a node, side by side."""

    def __init__(
        self, node: Beginning, readers: Sequence[tuple[int, int]], tokens: int, device: torch.device
    ) -> None:
        """Choose some tokens of a batch: the index of each in the batch and in its conversation."""
        start = sum(each.tokens for each in node.path[:-1])
        last = [index - start for _, index in readers]
        self._held, self._tokens = node.held, node.tokens
        everyone = len(readers) == tokens
        self._rows = None if everyone else torch.tensor([row for row, _ in readers], device=device)
        self._nearest, self._farthest = min(last), max(last)
        self._mask = masks(last, node.tokens, device)

    def join(self, query: Tensor, found: Tensor, sums: Tensor, ask: Ask) -> tuple[Tensor, Tensor]:
        """Join with the results of other tokens [tokens, heads, features], and their log-sum-exps [tokens, heads]."""
        window = ask.window
        if window is not None and self._nearest - window >= self._tokens - 1:
            return found, sums
        rows = self._rows
        mask = None if window is None or self._farthest < window else self._mask(window, query.dtype)
        own, own_sums = (found, sums) if rows is None else (found[rows], sums[rows])
        more, more_sums = self._attend(query[0] if rows is None else query[0][:, rows], mask, ask)
        if mask is not None:  # a token that sees none of them
            more_sums = more_sums.masked_fill(mask[:, -1:].isneginf(), -torch.inf)
        share = (more_sums - own_sums).sigmoid()[..., None]
        joined = torch.lerp(own.float(), more.float(), share.float()).to(found.dtype)
        total = torch.logaddexp(own_sums, more_sums)
        if rows is None:
            return joined, total
        return found.index_copy(0, rows, joined), sums.index_copy(0, rows, total)

    def _attend(self, query: Tensor, mask: Tensor | None, ask: Ask) -> tuple[Tensor, Tensor]:
        """Attend to the node alone: [heads, tokens, features] to [tokens, heads, features] and log-sum-exps."""
        keys, values = self._held[ask.layer]
        tokens, wide = query.shape[1], (len(keys), -1)
        asking = query.unflatten(0, wide).flatten(1, 2)[None]
        if mask is not None:
            mask = mask.repeat(asking.shape[2] // tokens, 1)[None, None]
        found, sums = _flash(asking, keys[None], values[None], 0.0, False, attn_mask=mask, scale=ask.scaling)
        found, sums = (each[0].unflatten(1, (-1, tokens)).flatten(0, 1) for each in (found, sums))
        return found.transpose(0, 1), sums.T
