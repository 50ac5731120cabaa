"""Attention of conversations side by side against each conversation alone."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from perturn.engines.local import cache_blocks as _attention
from perturn.engines.local import kv_cache as _history
from perturn.engines.local.cache_blocks import Blocks
from perturn.engines.local.kv_cache import History, _attend, attending
from perturn.engines.local.prefix_tree import Beginnings
from support.crossed import crossed

HEADS, FEATURES = 4, 8
LAYER = SimpleNamespace(layer_idx=0)


class Conversation:
    """Its queries, keys and values, and what it should get for them."""

    def __init__(self, blocks, seed, key_heads, dtype, window=None):
        draw = torch.Generator().manual_seed(seed)
        self.query, self.key, self.value = (
            torch.randn(heads, 400, FEATURES, generator=draw).to(dtype)
            for heads in (HEADS, key_heads, key_heads)
        )
        self.history = History(blocks)
        self.window = window

    def begin(self, path, apart):
        """Go on from nodes, whose keys and values it then has too."""
        self.history.begin(path, apart)
        start = 0
        for node in path:
            for mine, theirs in zip((self.key, self.value), node.held[0], strict=True):
                mine[:, start : start + node.tokens] = theirs
            start += node.tokens

    def expected(self, start, stop):
        """Exact attention [tokens, heads, features]."""
        wide = [self.query[:, :stop].double()]
        wide += [
            each[:, :stop].double().repeat_interleave(HEADS // len(each), 0)
            for each in (self.key, self.value)
        ]
        index = torch.arange(stop)
        sees = (index <= index[:, None]) & (index > index[:, None] - (self.window or stop))
        return F.scaled_dot_product_attention(*wide, attn_mask=sees)[:, start:stop].transpose(0, 1)


def feed(parts):
    """Feed each conversation so many new tokens, in this order: what they get, and what they should."""
    bounds = [(each, len(each.history.ids), len(each.history.ids) + new) for each, new in parts]
    inputs = [
        torch.cat([getattr(each, name)[:, start:stop] for each, start, stop in bounds], 1)[None]
        for name in ("query", "key", "value")
    ]
    with attending([(each.history, new) for each, new in parts], torch.device("cpu")):
        found, _ = _attend(LAYER, *inputs, None, sliding_window=parts[0][0].window)
    for each, _, stop in bounds:
        each.history.ids = list(range(stop))
    expected = torch.cat([each.expected(start, stop) for each, start, stop in bounds])
    return found[0].double(), expected


TOLERANCE = {torch.float32: {"atol": 1e-5, "rtol": 0}, torch.bfloat16: {"atol": 0.03, "rtol": 0}}


KEY_HEADS = [(4, torch.float32), (2, torch.bfloat16), (2, torch.float32), (4, torch.bfloat16)]
"""Heads of keys, and type."""


@pytest.mark.parametrize(
    ("heads", "lengths"), crossed(KEY_HEADS, [(40, 150, 50, 160), (40, 50, 60, 40), (150, 50, 160, 170)])
)
def test_each_gets_its_own_whatever_their_order(heads, lengths):
    """Two sizes of slots in every order of rows; some feed one token, some a few, some too many."""
    (key_heads, dtype), blocks = heads, Blocks(lambda _: 4)
    talks = [Conversation(blocks, seed, key_heads, dtype) for seed in range(4)]
    feeds = [list(zip(talks, lengths, strict=True))]
    feeds += [[(each, 1) for each in order] for order in itertools.permutations(talks)]
    feeds += [list(zip(talks, new, strict=True)) for new in itertools.product((1, 2), repeat=4)]
    feeds += [list(zip(talks, new, strict=True)) for new in itertools.permutations((1, 3, 8, 9))]
    for parts in feeds:
        assert_close(*feed(parts), **TOLERANCE[dtype])


@pytest.mark.parametrize("heads", KEY_HEADS)
@pytest.mark.parametrize("window", [None, 5, 70])
def test_a_gpu_gives_observations_a_call_together(heads, window, monkeypatch):
    """Conversations with up to 8 and up to 64 new tokens share a call each; one with 65 has a call of its own."""
    monkeypatch.setattr(_history, "_WIDTHS", _history._OTHER_WIDTHS)
    (key_heads, dtype), blocks = heads, Blocks(lambda _: 5)
    talks = [Conversation(blocks, seed, key_heads, dtype, window) for seed in range(5)]
    calls = []
    for name in ("_Alone", "_Together"):
        made = getattr(_history, name)
        monkeypatch.setattr(
            _history, name, lambda *given, made=made: calls.append(made.__name__) or made(*given)
        )

    def calls_of(*new):
        calls.clear()
        assert_close(*feed(list(zip(talks, new, strict=True))), **TOLERANCE[dtype])
        return sorted(calls)

    assert calls_of(66, 66, 66, 66, 66) == ["_Alone"] * 5
    assert {talk.history.slot.block.capacity for talk in talks} == {128}
    with monkeypatch.context() as few:
        few.setattr(_history, "_PAIRS", 4 * 40 * 128)  # four slots, so the fifth has a call of its own
        assert calls_of(20, 40, 3, 3, 20) == ["_Together"] * 3
    assert calls_of(3, 2, 20, 20, 9) == ["_Together"] * 2
    assert calls_of(1, 9, 3, 65, 10) == ["_Alone"] + ["_Together"] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bytes_of_a_call", [0, 2**40], ids=["divided", "whole"])
def test_slots_between_that_are_silent(dtype, bytes_of_a_call, monkeypatch):
    """Every other one of six that lie side by side, read over or in calls of their own."""
    monkeypatch.setattr(_history, "CALL_BYTES", bytes_of_a_call)
    blocks = Blocks(lambda _: 6)
    talks = [Conversation(blocks, seed, 4, dtype) for seed in range(6)]
    feed([(each, 20 + index) for index, each in enumerate(talks)])
    made = []
    together = _history._Together
    monkeypatch.setattr(_history, "_Together", lambda *given: made.append(given) or together(*given))
    found, expected = feed([(each, 1) for each in talks[::2]])

    assert_close(found, expected, **TOLERANCE[dtype])
    assert len(made) == (1 if bytes_of_a_call else 3)


def test_tokens_that_are_dropped_are_written_over():
    """Of 1, 4 and 7 new tokens all are dropped, and others fed: they get what they get without them."""
    blocks = Blocks(lambda _: 4)
    talks = [Conversation(blocks, seed, 2, torch.float32) for seed in range(3)]
    feed([(each, 20) for each in talks])
    others = [Conversation(blocks, 9 + seed, 2, torch.float32) for seed in range(3)]
    for talk, other in zip(talks, others, strict=True):
        other.history = talk.history
    feed(list(zip(others, (1, 4, 7), strict=True)))
    for talk in talks:
        del talk.history.ids[20:]

    assert_close(*feed([(each, 3) for each in talks]), **TOLERANCE[torch.float32])


def test_bfloat16_attends_past_a_multiple_of_the_step():
    """63, 64 and 65 tokens: what is read is rounded up, and never beyond the slot."""
    talk = Conversation(Blocks(lambda _: 2), 0, 4, torch.bfloat16)
    feed([(talk, 60)])
    for _ in range(140):
        assert_close(*feed([(talk, 1)]), **TOLERANCE[torch.bfloat16])


def beginnings(key_heads, dtype):
    """Three nodes in a row, of 64, 32 and 64 tokens, with keys and values."""
    tree, draw = Beginnings(), torch.Generator().manual_seed(9)
    end = tree.join([*range(161)], History(Blocks(lambda _: 1)))
    for tokens in (96, 64):
        tree.join([*range(tokens + 1)], History(Blocks(lambda _: 1)))
    for node in end.path:
        key, value = (torch.randn(key_heads, node.tokens, FEATURES, generator=draw).to(dtype) for _ in "kv")
        node.held = {0: (key, value)}
    assert [node.tokens for node in end.path] == [64, 32, 64]
    return end.path


@pytest.mark.parametrize(("heads", "window"), crossed(KEY_HEADS, [None, 5, 20, 70, 100, 300]))
def test_what_lies_apart_is_seen_by_all_that_go_on_from_it(heads, window):
    """Of seven conversations four go on from all nodes, two or one, some copied in part; one has nothing apart."""
    key_heads, dtype = heads
    path, blocks = beginnings(key_heads, dtype), Blocks(lambda _: 4)
    talks = [Conversation(blocks, seed, key_heads, dtype, window) for seed in range(7)]
    for talk, (nodes, apart) in zip(
        talks, [(3, 3), (3, 3), (3, 1), (2, 2), (1, 1), (2, 0), (0, 0)], strict=True
    ):
        talk.begin(path[:nodes], apart)
    feeds = [[(each, 3 + n) for n, each in enumerate(talks)], [(each, 1) for each in talks[::-1]]]
    feeds += [[(each, 1 + n % 2) for n, each in enumerate(talks)], [(each, 1) for each in talks[:2]]]
    for parts in feeds * 8:
        assert_close(*feed(parts), **TOLERANCE[dtype])
    assert [each.history.tokens_apart for each in talks] == [160, 160, 64, 96, 64, 0, 0]


def test_one_product_for_all_that_go_on_from_a_node(monkeypatch):
    """Four conversations: one call to what lies apart, and one to their slots."""
    path, blocks = beginnings(4, torch.float32), Blocks(lambda _: 4)
    talks = [Conversation(blocks, seed, 4, torch.float32) for seed in range(4)]
    for talk in talks:
        talk.begin(path[:1], 1)
    feed([(each, 5) for each in talks])
    kernel, rows = _attention._flash, []
    monkeypatch.setattr(
        _attention, "_flash", lambda query, *a, **k: rows.append(query.shape[:3]) or kernel(query, *a, **k)
    )
    assert_close(*feed([(each, 1) for each in talks]), **TOLERANCE[torch.float32])

    assert rows == [(4, 4, 1), (1, 4, 4)]


def test_a_conversation_that_outgrows_its_slot_keeps_what_lies_apart():
    """64 tokens apart and 60 in a slot of 64, then 20 more."""
    talk = Conversation(Blocks(lambda _: 2), 0, 4, torch.float32)
    talk.begin(beginnings(4, torch.float32)[:1], 1)
    feed([(talk, 60)])
    assert talk.history.slot.block.capacity == 64

    assert_close(*feed([(talk, 20)]), **TOLERANCE[torch.float32])
    assert_close(*feed([(talk, 1)]), **TOLERANCE[torch.float32])
