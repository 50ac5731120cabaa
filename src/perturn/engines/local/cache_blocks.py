"""Memory for keys and values: conversations of about one length side by side in a block, one buffer a layer.

One call then attends for all of them, which is what counts when each has one new token and the model is small.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, count
from weakref import WeakSet

from torch import Tensor

_STEP = 64
"""Capacities are multiples of so many tokens."""
_NUMBERS = count()


def capacity_for(tokens: int) -> int:
    """The smallest capacity a slot can have that holds so many tokens; each is half as large again."""
    capacity = _STEP
    while capacity < tokens:
        capacity = -(-(capacity + capacity // 2) // _STEP) * _STEP
    return capacity


class Block:
    """Buffers of several conversations, each of which has a slot in them."""

    def __init__(self, slots: int, capacity: int) -> None:
        """An empty block for so many conversations, each of so many tokens."""
        self.capacity = capacity
        self.number = next(_NUMBERS)
        """A block made later has a larger one."""
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values by layer, each [slots, key heads, capacity, features]."""
        self._slots, self._bytes = slots, 0
        self.free = list(range(slots))
        self._ever = 0  # slots before this one have been given out

    @property
    def slot_bytes(self) -> int:
        """Memory of one slot."""
        return self._bytes // self._slots

    @property
    def token_bytes(self) -> int:
        """Memory of one token in one layer."""
        return self.slot_bytes // (self.capacity * max(1, len(self.layers)))

    def take(self) -> Slot:
        """The first free slot; what was never written there is zero, so that it can be attended to and masked."""
        index = min(self.free)
        self.free.remove(index)
        if index == self._ever:
            self._ever += 1
            for each in chain(*self.layers.values()):
                each[index] = 0.0
        return Slot(self, index)

    def open(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of a layer, made for keys and values of these shapes [1, key heads, tokens, features]."""
        if layer not in self.layers:
            self.layers[layer] = self._buffer(key), self._buffer(value)
            self._bytes += sum(each.nbytes for each in self.layers[layer])
        return self.layers[layer]

    def _buffer(self, like: Tensor) -> Tensor:
        buffer = like.new_empty(self._slots, like.shape[1], self.capacity, like.shape[3])
        buffer[: self._ever] = 0.0
        return buffer


class Slot:
    """One conversation's part of a block; free again as soon as nobody holds it."""

    def __init__(self, block: Block, index: int) -> None:
        """Only `Block.take` makes one."""
        self.block, self.index = block, index

    def __del__(self) -> None:
        """Give the slot back."""
        self.block.free.append(self.index)


class Blocks:
    """All blocks that somebody holds a slot of, by size."""

    def __init__(self, slots: int) -> None:
        """Nothing yet; a block will hold so many conversations."""
        self._slots = slots
        self._blocks: defaultdict[int, WeakSet[Block]] = defaultdict(WeakSet)

    def take(self, tokens: int) -> Slot:
        """A slot for so many tokens, in the block where most conversations are already, of these the oldest."""
        capacity = capacity_for(tokens)
        unfilled = [block for block in self._blocks[capacity] if block.free]
        block = min(unfilled, key=lambda block: (len(block.free), block.number), default=None) or Block(
            self._slots, capacity
        )
        self._blocks[capacity].add(block)
        return block.take()
