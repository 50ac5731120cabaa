import pytest
import torch

from turnwise.errors import DataError
from turnwise.policy.examples import Example, check_lengths, collate, encode_example
from turnwise.policy.tokens import NO_TURN, Encoded
from turnwise.types import Action, PreferencePair, Task, Trajectory, Turn


def trajectory(*said):
    """A conversation whose observations depend on nothing but their place."""
    turns = [
        Turn(({"role": "user", "content": f"observation {i}"},), Action(text)) for i, text in enumerate(said)
    ]
    return Trajectory(Task("t/1"), tuple(turns))


def pair(chosen, rejected):
    return PreferencePair(trajectory(*chosen), trajectory(*rejected))


def encoded(*ids):
    return Encoded(ids, (NO_TURN, *[0] * (len(ids) - 1)), ("user",) * len(ids))


def loss_turns_of(side):
    return sorted(set(side.turn) - {NO_TURN})


def test_sides_of_the_same_tokens_are_refused(renderer):
    """There is nothing to prefer; the task is named."""
    with pytest.raises(DataError, match=r"chosen equals rejected for task 't/1'; remove the pair"):
        encode_example(pair(["a", "b"], ["a", "b"]), renderer, None)


def test_sides_that_truncation_makes_equal_are_refused(renderer):
    """They differ in their second turn, which does not fit; the message says so."""
    limit = len(renderer.encode(trajectory("a")).ids) + 2

    with pytest.raises(DataError, match="chosen equals rejected after truncation"):
        encode_example(pair(["a", "b"], ["a", "c"]), renderer, limit)


def test_a_shared_prefix_is_kept_by_default(renderer):
    """All turns of both sides carry loss."""
    example = encode_example(pair(["a", "b", "c"], ["a", "b", "d"]), renderer, None)

    assert loss_turns_of(example.chosen) == [0, 1, 2]
    assert loss_turns_of(example.rejected) == [0, 1, 2]


@pytest.mark.parametrize(
    ("chosen", "rejected", "left"),
    [
        (["a", "b", "c"], ["a", "b", "d"], ([2], [2])),
        (["a", "b"], ["c", "b"], ([0, 1], [0, 1])),
        (["a", "b", "c"], ["a", "d"], ([1, 2], [1])),
        (["a", "b"], ["a"], ([0, 1], [0])),
    ],
)
def test_a_masked_prefix_is_the_whole_turns_both_sides_begin_with(renderer, chosen, rejected, left):
    """No side is left without loss: in the last case the rejected side is all prefix, so nothing is masked."""
    example = encode_example(pair(chosen, rejected), renderer, None, "mask")

    assert (loss_turns_of(example.chosen), loss_turns_of(example.rejected)) == left


def test_a_turn_that_begins_alike_is_not_shared(renderer):
    """'go north' and 'go south' share a token, not a turn."""
    example = encode_example(pair(["go north"], ["go south"]), renderer, None, "mask")

    assert loss_turns_of(example.chosen) == [0]
    assert example.chosen == renderer.encode(trajectory("go north"))


def test_masking_leaves_the_tokens_alone(renderer):
    """Only who carries loss changes."""
    kept = encode_example(pair(["a", "b"], ["a", "c"]), renderer, None)
    masked = encode_example(pair(["a", "b"], ["a", "c"]), renderer, None, "mask")

    assert kept.chosen.ids == masked.chosen.ids
    assert kept.rejected.ids == masked.rejected.ids


def test_a_trajectory_is_an_example_with_one_side(renderer):
    """Its rejected side is None."""
    example = encode_example(trajectory("a"), renderer, None)

    assert example.sides == (renderer.encode(trajectory("a")),)


def test_a_batch_holds_all_chosen_sides_then_all_rejected_sides():
    """Worked by hand, the reference in the same order."""
    one = Example(encoded(1, 2), encoded(3, 4, 5), (torch.tensor([0.1]), torch.tensor([0.2, 0.3])))
    two = Example(encoded(6, 7, 8), encoded(9, 10), (torch.tensor([0.4, 0.5]), torch.tensor([0.6])))
    batch = collate([one, two])

    assert batch["ids"].tolist() == [1, 2, 6, 7, 8, 3, 4, 5, 9, 10]
    assert batch["turn"].tolist() == [-1, 0, -1, 0, 0, -1, 0, 0, -1, 0]
    assert batch["lengths"].tolist() == [2, 3, 3, 2]
    assert batch["pairs"].tolist() == [2]
    assert torch.equal(batch["reference"], torch.tensor([0.1, 0.4, 0.5, 0.2, 0.3, 0.6]))


def test_a_batch_without_a_reference_has_none():
    """Where no loss reads it, no tensor stands in for it."""
    assert set(collate([Example(encoded(1, 2))])) == {"ids", "turn", "lengths", "pairs"}


def test_a_sequence_longer_than_the_context_is_refused():
    """The longest side decides, rejected ones too; at the limit it fits, and None is no limit."""
    examples = [Example(encoded(1, 2), encoded(1, 2, 3, 4))]

    with pytest.raises(DataError, match=r"longest sequence has 4 tokens.*context is 3; set max_length to 3"):
        check_lengths(examples, 3)
    check_lengths(examples, 4)
    check_lengths(examples, None)
