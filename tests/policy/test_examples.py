from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from perturn.chat.model_names import load_tokenizer
from perturn.chat.tokens import NO_TURN, Encoded, Renderer
from perturn.credit import Confidence, Uniform
from perturn.errors import DataError
from perturn.policy.examples import (
    Example,
    check_lengths,
    count_unknown,
    encode_example,
    warn_of_changes,
    warn_of_equal_weights,
)
from perturn.policy.packing import Collator, Examples, Filled, collate
from perturn.turns import OPENS, Opening
from perturn.types import Action, PreferencePair, Task, Trajectory, Turn, WeightedTrajectory


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


def test_sides_that_differ_in_unknown_words_are_told_apart_from_equal_sides():
    """tiny-agent knows neither word."""
    renderer = Renderer(load_tokenizer("tiny-agent"))
    with pytest.raises(DataError, match=r"same tokens for task 't/1': they differ in words .*<\|unknown\|>"):
        encode_example(pair(["zzz"], ["yyy"]), renderer, None)
    with pytest.raises(DataError, match="chosen equals rejected for task"):
        encode_example(pair(["zzz"], ["zzz"]), renderer, None)


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


def test_a_branch_carries_loss_on_its_own_turns_alone_if_asked(renderer):
    """The explored episode has those before; of a branch without any that fits nothing can be learned."""
    branch = replace(trajectory("a", "b", "c"), origin=0, sample=4, taken_over=1)

    assert loss_turns_of(encode_example(branch, renderer, None).chosen) == [0, 1, 2]
    own = encode_example(branch, renderer, None, own_turns=True)
    assert loss_turns_of(own.chosen) == [1, 2]
    assert own.chosen.ids == renderer.encode(branch).ids
    explored = replace(branch, origin=None)
    assert loss_turns_of(encode_example(explored, renderer, None, own_turns=True).chosen) == [0, 1, 2]
    limit = len(renderer.encode(trajectory("a")).ids) + 2
    with pytest.raises(
        DataError, match=r"sample 4: none of the turns .* from turn 1 on, fits the length limit"
    ):
        encode_example(branch, renderer, limit, own_turns=True)


def test_an_own_turn_that_fits_is_found_when_a_turn_before_it_is_cut(renderer):
    """The first conversation is too long; the branch's own turns are in the second one."""
    played = trajectory("a " * 30, "b", "c", "d")
    second = replace(played.turns[1], follows=OPENS, opening=Opening(({"role": "user", "content": "x"},)))
    turns = (played.turns[0], second, replace(played.turns[2], follows=1), played.turns[3])
    branch = replace(played, turns=turns, origin=0, taken_over=2)
    whole = renderer.encode(branch)

    assert loss_turns_of(encode_example(branch, renderer, whole.starts[1] - 1, own_turns=True).chosen) == [2]


def test_a_row_with_weights_says_itself_which_turns_carry_loss(renderer):
    """Its word stands before the credit's; without a word the credit's stands. An expert's takeover has no origin."""
    played = trajectory("north", "south", "east")
    branch, takeover = replace(played, origin=0, taken_over=1), replace(played, taken_over=2)

    def loss_turns(episode, said, own_turns):
        row = WeightedTrajectory(episode, (1.0, 1.0, 1.0), own_turns=said)
        return loss_turns_of(encode_example(row, renderer, None, own_turns=own_turns).chosen)

    assert loss_turns(branch, True, False) == loss_turns(branch, None, True) == [1, 2]
    assert loss_turns(branch, False, True) == loss_turns(branch, None, False) == [0, 1, 2]
    assert loss_turns(takeover, True, False) == [2]
    assert loss_turns(takeover, None, True) == [0, 1, 2]


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

    assert batch["ids"].tolist() == [1, 3, 4, 6, 7, 9]
    assert batch["position"].tolist() == [0, 0, 1, 0, 1, 0]
    assert batch["segments"].tolist() == [[0, 1, 1], [1, 3, 3], [3, 5, 5], [5, 6, 6]]
    assert batch["target"][batch["prediction"]].tolist() == [2, 7, 8, 4, 5, 10]
    assert batch["predictor"][batch["prediction"]].tolist() == [0, 3, 4, 1, 2, 5]
    assert batch["trajectory"].tolist() == [0, 1, 1, 2, 2, 3]
    assert batch["turn"].tolist() == [0] * 6
    assert batch["pairs"].tolist() == [2]
    assert torch.equal(batch["reference"], torch.tensor([0.1, 0.4, 0.5, 0.2, 0.3, 0.6]))


def test_a_batch_without_a_reference_has_none():
    """Where no loss reads it, no tensor stands in for it."""
    batch = collate([Example(encoded(1, 2))])

    assert set(batch) == {
        "ids",
        "position",
        "segments",
        "predictor",
        "target",
        "prediction",
        "turn",
        "trajectory",
        "pairs",
    }


def test_a_pair_shares_what_its_sides_begin_with():
    """39 tokens are fed once, then 1 and 2 more; the last token of each side is only predicted."""
    common = range(100, 139)
    batch = collate([Example(encoded(*common, 1, 0), encoded(*common, 2, 3, 0))])

    assert batch["segments"].tolist() == [[0, 39, 42], [39, 40, 40], [40, 42, 42]]
    assert len(batch["trajectory"]) == 40 + 41
    assert len(batch["predictor"]) == 38 + 2 + 3


def test_a_collator_divides_its_examples_into_packs():
    """Sides of 2 tokens, 4 a pair: two pairs to a pack of 8, ordered by their tokens, the third one apart."""
    examples = [Example(encoded(i, 50 + i), encoded(10 + i, 60 + i)) for i in (3, 1, 2)]
    packs = Collator(token_budget=8)(examples)["packs"]

    assert [pack["pairs"].tolist() for pack in packs] == [[2], [1]]
    assert [pack["ids"].tolist() for pack in packs] == [[1, 2, 11, 12], [3, 13]]


@pytest.mark.parametrize("budget", [1, 4, 100])
def test_packs_hold_every_pair_with_its_reference(budget):
    """Whatever the budget: each loss token keeps the reference it came with, here its own id."""
    sides = [encoded(i, 50 + i, 70 + i) for i in range(10)]
    examples = [
        Example(*pair, tuple(torch.tensor([float(token) for token in side.ids[1:]]) for side in pair))
        for pair in zip(sides[::2], sides[1::2], strict=True)
    ]
    packs = Collator(budget)(examples)["packs"]

    assert sum(int(pack["pairs"]) for pack in packs) == 5
    for pack in packs:
        assert pack["reference"].tolist() == pack["target"][pack["prediction"]].tolist()


def test_a_sequence_longer_than_the_context_is_refused():
    """The longest side decides, rejected ones too; at the limit it fits, and None is no limit."""
    examples = [Example(encoded(1, 2), encoded(1, 2, 3, 4))]

    with pytest.raises(
        DataError, match=r"longest sequence has 4 tokens.*exact only up to 3; set max_length to 3"
    ):
        check_lengths(examples, 3)
    check_lengths(examples, 4)
    check_lengths(examples, None)


@pytest.mark.parametrize(("rows", "multiple", "length"), [(7, 4, 8), (8, 4, 8), (1, 4, 4), (3, 1, 3)])
def test_rows_are_filled_until_they_divide_evenly(rows, multiple, length):
    """Every row once, in the sampler's order, and then nothing."""
    filled = Filled(range(rows), multiple)

    assert list(filled) == [*range(rows), *[None] * (length - rows)]
    assert len(filled) == length


def test_a_batch_without_rows_has_no_packs():
    """A process may have none in the last batch of an epoch, or fewer than others."""
    dataset, packs = Examples([Example(encoded(1, 2))]), Collator(token_budget=8)

    assert packs([dataset[None], dataset[None]]) == {"packs": [], "mismatched": []}
    assert packs([dataset[0], dataset[None]])["packs"][0]["pairs"].tolist() == [1]


@pytest.mark.parametrize(("unknown", "warned"), [(1, False), (2, True)])
def test_text_that_the_tokenizer_does_not_know_is_counted_and_logged(caplog, unknown, warned):
    """From 1 % of the tokens on: 1 and 2 of 150. An unknown token with another role is a token like any other."""
    tokenizer = SimpleNamespace(
        unk_token="<?>", unk_token_id=9, bos_token_id=None, eos_token_id=2, pad_token_id=2, chat_template=""
    )
    rows = [Example(encoded(*[9] * unknown, *[1] * (150 - unknown)))]

    warn_of_changes("train", rows, None, tokenizer)

    assert count_unknown(rows, tokenizer) == unknown
    assert ("train: 2 of 150 tokens are <?>, since the tokenizer" in caplog.text) == warned
    tokenizer.pad_token_id = 9
    assert count_unknown(rows, tokenizer) == 0


@pytest.mark.parametrize("words", ["", "{{ mood }}"])
def test_what_the_chat_template_does_not_read_is_counted_and_logged(caplog, words):
    """Template variables of rows, which the policy would never see."""
    given = replace(trajectory("a"), template_kwargs={"mood": "calm"})
    rows = [replace(Example(encoded(1, 2)), whole=(each,)) for each in (trajectory("a"), given)]
    tokenizer = SimpleNamespace(
        unk_token_id=None, bos_token_id=None, eos_token_id=2, pad_token_id=2, chat_template=words
    )

    warn_of_changes("train", rows, None, tokenizer)

    assert ("train: 1 rows have mood, which" in caplog.text) == (not words)


@pytest.mark.parametrize(("credit", "weights", "warned"), [
    (Confidence(), (1.0, 1.0), True), (Confidence(), (1.0, 0.2), False), (Uniform(), (1.0, 1.0), False),
])  # fmt: skip
def test_equal_weights_of_a_credit_that_reads_the_reference_are_logged(caplog, credit, weights, warned):
    sides = tuple(torch.tensor([weight]) for weight in weights)

    warn_of_equal_weights([Example(encoded(1, 2), encoded(1, 3), weight=sides)], credit)

    assert (
        "gives all 2 turns the weight 1, so this training does not tell turns apart" in caplog.text
    ) == warned


def test_weights_of_zero_are_logged(caplog):
    """A credit of groups finds no group among conversations, since each conversation is a task."""
    for weights in ((0.0, 0.0), (0.0, 1.0)):
        sides = tuple(torch.tensor([each]) for each in weights)
        warn_of_equal_weights([Example(encoded(1, 2), encoded(1, 3), weight=sides)], Uniform())

    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("all 2 turns have the weight 0, so they give no gradient.")


def test_rows_share_one_object_for_a_token_id(whole_tokenizer):
    """A tokenizer returns new objects of 32 bytes for ids above 256."""
    renderer = Renderer(whole_tokenizer)
    first, second = (
        renderer.encode(trajectory(text)).ids for text in ("a heavy lantern", "one heavy lantern")
    )

    assert len({id(token) for token in (*first, *second)}) == len({*first, *second})
