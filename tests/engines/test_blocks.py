from itertools import pairwise

import pytest
import torch

from perturn.engines.local.cache_blocks import Blocks, capacity_for, slots_of
from perturn.engines.local.kv_cache import History


def written(slot, value, tokens=3):
    """Keys and values of one token after the other, in two layers of different shape."""
    for layer, heads in ((0, 2), (1, 3)):
        like = torch.zeros(1, heads, 1, 4)
        for buffer in slot.block.open(layer, like, like):
            buffer[slot.index, :, :tokens] = value
    return slot


def test_sizes_grow_by_half_and_hold_what_is_asked():
    sizes = sorted({capacity_for(tokens) for tokens in range(1, 5000)})

    assert sizes[:6] == [64, 128, 192, 320, 512, 768]
    assert all(after / before <= 2 for before, after in pairwise(sizes))
    assert all(
        capacity_for(tokens) >= tokens and capacity_for(capacity_for(tokens)) == capacity_for(tokens)
        for tokens in range(1, 5000)
    )


def test_conversations_of_about_one_length_lie_side_by_side():
    blocks = Blocks(lambda _: 2)
    short, other, third, long = (blocks.take(tokens) for tokens in (10, 64, 5, 65))

    assert short.block is other.block
    assert (short.index, other.index) == (0, 1)
    assert third.block is not short.block, "a block holds two"
    assert long.block.capacity == 128


@pytest.mark.parametrize(
    ("device", "token_bytes", "capacity", "slots"),
    [
        ("cpu", 10, 64, 16),
        ("cuda", 5000, 64, 1),
        ("cuda", 10, 100, 12),
        ("cuda", 10, 64, 19),
        ("cuda", 1, 64, 64),
    ],
)
def test_a_gpu_has_as_many_slots_in_a_block_as_an_eighth_of_the_memory_holds(
    device, token_bytes, capacity, slots
):
    assert slots_of(device, 100_000, token_bytes, capacity) == slots


def test_a_block_may_hold_fewer_of_the_longer_conversations():
    blocks = Blocks(lambda capacity: 256 // capacity)
    short, other, long, longer = (blocks.take(tokens) for tokens in (10, 64, 100, 128))

    assert short.block is other.block
    assert short.block.slots == 4
    assert long.block is longer.block
    assert long.block.slots == 2


def test_the_fullest_block_is_filled_first():
    blocks = Blocks(lambda _: 3)
    slots = [blocks.take(1) for _ in range(4)]
    assert slots[3].block is not slots[0].block
    full, slots[0] = slots[0].block, None

    assert blocks.take(1).block is full


def test_of_two_blocks_as_full_the_older_one_is_filled_first():
    """Not the one that lies first in memory, so that a play repeats; 20 times, since chance may hit it."""
    for _ in range(20):
        blocks = Blocks(lambda _: 2)
        slots = [blocks.take(1) for _ in range(8)]
        older = slots[2].block
        del slots[7], slots[5], slots[3]

        assert blocks.take(1).block is older


def test_a_slot_is_free_when_nobody_holds_it():
    blocks = Blocks(lambda _: 2)
    one, two = blocks.take(1), blocks.take(1)
    block = one.block
    del one

    assert block.free == [0]
    assert blocks.take(1).block is block
    assert two.index == 1


def test_a_block_without_conversations_is_gone():
    blocks = Blocks(lambda _: 2)
    slot = written(blocks.take(1), 1.0)
    assert len(blocks._blocks[64]) == 1
    del slot

    assert len(blocks._blocks[64]) == 0


@pytest.mark.parametrize("late", [False, True], ids=["before a layer is opened", "after"])
def test_what_was_never_written_is_zero_wherever_somebody_lies(late, monkeypatch):
    """Neighbours attend in one call, under a mask: what is masked must be a number. Fresh memory is made NaN here."""
    made = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args: made(*args).fill_(torch.nan))
    blocks = Blocks(lambda _: 3)
    slots = [blocks.take(1) for _ in range(1 if late else 2)]
    written(slots[0], 1.0)
    slots += [blocks.take(1)] if late else []

    for buffers in slots[0].block.layers.values():
        for buffer in buffers:
            assert buffer[0, :, :3].eq(1).all()
            assert buffer[0, :, 3:].eq(0).all()
            assert buffer[1].eq(0).all()
            assert buffer[2].isnan().all(), "nobody lies there"


def test_a_history_that_outgrows_its_slot_takes_everything_along():
    history = History(Blocks(lambda _: 2), ids=[1, 2, 3])
    history.reserve(3)
    written(history.slot, 5.0)
    left = history.slot.block
    history.reserve(100)

    assert sorted(left.free) == [0, 1]
    assert history.slot.block.capacity == 128
    for buffers in history.slot.block.layers.values():
        for buffer in buffers:
            assert buffer[0, :, :3].eq(5).all()
            assert buffer[0, :, 3:].eq(0).all()


def test_memory_is_counted_by_slot():
    """Two layers of 2 and 3 heads of 4 float32, keys and values, 64 tokens: 2 * 5 * 4 * 4 * 64 bytes."""
    history = History(Blocks(lambda _: 16))
    assert history.nbytes == 0
    history.reserve(1)
    written(history.slot, 1.0)

    assert history.nbytes == 2 * 5 * 4 * 4 * 64
