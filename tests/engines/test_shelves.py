from itertools import pairwise

import pytest
import torch

from perturn.engines.local.blocks import Shelves, room_for
from perturn.engines.local.history import History


def written(place, value, tokens=3):
    """Keys and values of one token after the other, in two layers of different shape."""
    for layer, heads in ((0, 2), (1, 3)):
        like = torch.zeros(1, heads, 1, 4)
        for buffer in place.block.open(layer, like, like):
            buffer[place.index, :, :tokens] = value
    return place


def test_sizes_grow_by_half_and_hold_what_is_asked():
    sizes = sorted({room_for(tokens) for tokens in range(1, 5000)})

    assert sizes[:6] == [64, 128, 192, 320, 512, 768]
    assert all(after / before <= 2 for before, after in pairwise(sizes))
    assert all(
        room_for(tokens) >= tokens and room_for(room_for(tokens)) == room_for(tokens)
        for tokens in range(1, 5000)
    )


def test_conversations_of_about_one_length_lie_side_by_side():
    shelves = Shelves(places=2)
    short, other, third, long = (shelves.take(tokens) for tokens in (10, 64, 5, 65))

    assert short.block is other.block
    assert (short.index, other.index) == (0, 1)
    assert third.block is not short.block, "a block holds two"
    assert long.block.room == 128


def test_the_fullest_block_is_filled_first():
    shelves = Shelves(places=3)
    places = [shelves.take(1) for _ in range(4)]
    assert places[3].block is not places[0].block
    full, places[0] = places[0].block, None

    assert shelves.take(1).block is full


def test_a_place_is_free_when_nobody_holds_it():
    shelves = Shelves(places=2)
    one, two = shelves.take(1), shelves.take(1)
    block = one.block
    del one

    assert block.free == [0]
    assert shelves.take(1).block is block
    assert two.index == 1


def test_a_block_without_conversations_is_gone():
    shelves = Shelves(places=2)
    place = written(shelves.take(1), 1.0)
    assert len(shelves._blocks[64]) == 1
    del place

    assert len(shelves._blocks[64]) == 0


@pytest.mark.parametrize("late", [False, True], ids=["before a layer is opened", "after"])
def test_what_was_never_written_is_zero_wherever_somebody_lies(late, monkeypatch):
    """Neighbours attend in one call, under a mask: what is masked must be a number. Fresh memory is made NaN here."""
    made = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args: made(*args).fill_(torch.nan))
    shelves = Shelves(places=3)
    places = [shelves.take(1) for _ in range(1 if late else 2)]
    written(places[0], 1.0)
    places += [shelves.take(1)] if late else []

    for buffers in places[0].block.layers.values():
        for buffer in buffers:
            assert buffer[0, :, :3].eq(1).all()
            assert buffer[0, :, 3:].eq(0).all()
            assert buffer[1].eq(0).all()
            assert buffer[2].isnan().all(), "nobody lies there"


def test_a_history_that_outgrows_its_place_takes_everything_along():
    history = History(Shelves(places=2), ids=[1, 2, 3])
    history.reserve(3)
    written(history.place, 5.0)
    left = history.place.block
    history.reserve(100)

    assert sorted(left.free) == [0, 1]
    assert history.place.block.room == 128
    for buffers in history.place.block.layers.values():
        for buffer in buffers:
            assert buffer[0, :, :3].eq(5).all()
            assert buffer[0, :, 3:].eq(0).all()


def test_memory_is_counted_by_place():
    """Two layers of 2 and 3 heads of 4 float32, keys and values, 64 tokens: 2 * 5 * 4 * 4 * 64 bytes."""
    history = History(Shelves(places=16))
    assert history.nbytes == 0
    history.reserve(1)
    written(history.place, 1.0)

    assert history.nbytes == 2 * 5 * 4 * 4 * 64
