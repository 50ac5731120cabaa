"""Where keys and values of conversations lie: conversations of about one length side by side, in one buffer a layer.

One call then attends for all of them, which is what counts when each has one new token and the model is small.
"""

from __future__ import annotations

from collections import defaultdict
from weakref import WeakSet

from torch import Tensor

_STEP = 64
"""Room is a multiple of so many tokens."""


def room_for(tokens: int) -> int:
    """The least of the sizes in which room is given out that holds so many tokens; each is half as large again."""
    room = _STEP
    while room < tokens:
        room = -(-(room + room // 2) // _STEP) * _STEP
    return room


class Block:
    """Buffers of several conversations, each of which has a place in them."""

    def __init__(self, places: int, room: int) -> None:
        """An empty block.

        Args:
            places: Conversations that it holds.
            room: Tokens of each.
        """
        self.room = room
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values by layer, each [places, key heads, room, features]."""
        self._places = places
        self.free = list(range(places))
        self._ever = 0  # places before this one have been given out

    @property
    def place_bytes(self) -> int:
        """Memory of one place."""
        return sum(each.nbytes for pair in self.layers.values() for each in pair) // self._places

    @property
    def token_bytes(self) -> int:
        """Memory of one token in one layer."""
        return self.place_bytes // (self.room * max(1, len(self.layers)))

    def take(self) -> Place:
        """The first free place; what was never written there is zero, so that it can be attended to and masked."""
        index = min(self.free)
        self.free.remove(index)
        if index == self._ever:
            self._ever += 1
            for each in (buffer for pair in self.layers.values() for buffer in pair):
                each[index] = 0.0
        return Place(self, index)

    def open(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of a layer, made for keys and values of these shapes [1, key heads, tokens, features]."""
        if layer not in self.layers:
            self.layers[layer] = self._buffer(key), self._buffer(value)
        return self.layers[layer]

    def _buffer(self, like: Tensor) -> Tensor:
        buffer = like.new_empty(self._places, like.shape[1], self.room, like.shape[3])
        buffer[: self._ever] = 0.0
        return buffer


class Place:
    """One conversation's part of a block; free again as soon as nobody holds it."""

    def __init__(self, block: Block, index: int) -> None:
        """Only `Block.take` makes one."""
        self.block, self.index = block, index

    def __del__(self) -> None:
        """The next conversation may have it."""
        self.block.free.append(self.index)


class Shelves:
    """All blocks that somebody holds a place of, by size."""

    def __init__(self, places: int) -> None:
        """Nothing yet.

        Args:
            places: Conversations of a block.
        """
        self._places = places
        self._blocks: defaultdict[int, WeakSet[Block]] = defaultdict(WeakSet)

    def take(self, tokens: int) -> Place:
        """A place with room for so many tokens, where most conversations are already."""
        room = room_for(tokens)
        open_ = [block for block in self._blocks[room] if block.free]
        block = min(open_, key=lambda block: len(block.free), default=None)
        if block is None:
            block = Block(self._places, room)
            self._blocks[room].add(block)
        return block.take()
