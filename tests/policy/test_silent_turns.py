"""Turns without loss: they stay in the sequence, and leave means, denominators, turn counts and discounts."""

import json
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from perturn.chat.tokens import NO_TURN, Renderer
from perturn.data.records import trajectory_from_dict, trajectory_to_dict
from perturn.errors import DataError
from perturn.policy.examples import encode_example
from perturn.policy.logprobs import action_logprobs
from perturn.policy.packing import lay_out
from perturn.types import PreferencePair, WeightedTrajectory

from .training import history, trajectory

SAID = ["north", "take the lamp", "open door", "east", "up"]


def without(episode, *off):
    """The episode with turns that are not to be trained."""
    turns = [replace(turn, trained=number not in off) for number, turn in enumerate(episode.turns)]
    return replace(episode, turns=tuple(turns))


def as_prompt(episode, count):
    """The episode with its first turns in the prompt, which carries no loss."""
    before = replace(episode, turns=episode.turns[:count]).messages
    return replace(episode, prompt=tuple(before), turns=episode.turns[count:])


def sampled(episode, tokenizer):
    """The episode as a policy would have sampled it, at a log-probability of -1 for each token."""
    encoded = Renderer(tokenizer).encode(episode)
    ids = [
        tuple(i for i, of in zip(encoded.ids, encoded.turn, strict=True) if of == t) for t in range(len(SAID))
    ]
    turns = [
        replace(turn, action=replace(turn.action, token_ids=own, logprobs=(-1.0,) * len(own)))
        for turn, own in zip(episode.turns, ids, strict=True)
    ]
    return replace(episode, turns=tuple(turns))


def first(trainer):
    trainer.train()
    return torch.tensor([history(trainer, name)[0] for name in ("loss", "grad_norm")])


def pairs_of(change):
    sides = (
        trajectory(*SAID, task="t/0"),
        trajectory("south", "key", "box", "west", "wait here", task="t/0"),
    )
    return [PreferencePair(*(change(side, len(SAID) - 1) for side in sides))]


LOSSES = ["sft", "dpo", {"name": "dpo", "reduction": "turn_mean"}, "dmpo", "dil"]
LOSSES += ["tlm-dre", {"name": "tlm-dre", "reduction": "turn_mean"}, {"name": "tlm-dre", "reduction": "sum"}]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_four_of_five_turns_off_are_four_turns_in_the_prompt(train, loss):
    """One loss and one gradient; with all five turns on, it is another."""
    off = first(train(pairs_of(lambda side, n: without(side, *range(n))), loss=loss))
    prompt = first(train(pairs_of(as_prompt), loss=loss))
    whole = first(train(pairs_of(lambda side, n: side), loss=loss))

    assert_close(off, prompt, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(off[1], whole[1], rtol=1e-3)


@pytest.mark.parametrize("aggregate", ["token_mean", "turn_mean", "trajectory_mean", "token_sum"])
def test_weights_of_turns_that_are_off_go_with_them(train, tokenizer, aggregate):
    """Of a policy gradient; the weight of the turn that is trained stays its own."""
    episode = sampled(trajectory(*SAID), tokenizer)
    off = WeightedTrajectory(without(episode, 0, 1, 2, 3), (9.0, 9.0, -9.0, 9.0, 0.5))
    prompt = WeightedTrajectory(as_prompt(episode, 4), (0.5,))
    loss = {"name": "ppo-clip", "aggregate": aggregate}

    assert_close(first(train([off], loss=loss)), first(train([prompt], loss=loss)), rtol=1e-4, atol=1e-6)


def test_a_turn_between_others_is_left_out(train, tokenizer, tiny_model):
    """The first loss of sft is the mean over the tokens of the turns that are on."""
    episode = without(trajectory(*SAID), 1, 3)
    encoded = Renderer(tokenizer).encode(episode)
    with torch.no_grad():
        logprobs = action_logprobs(tiny_model, lay_out([Renderer(tokenizer).encode(trajectory(*SAID))]))
    turn = torch.tensor(Renderer(tokenizer).encode(trajectory(*SAID)).loss_turns)
    kept = torch.isin(turn, torch.tensor([0, 2, 4]))

    assert sorted(set(encoded.loss_turns)) == [0, 2, 4]
    assert encoded.dropped_turns == 0
    assert encoded.ids == Renderer(tokenizer).encode(trajectory(*SAID)).ids
    assert first(train([episode], loss="sft"))[0] == pytest.approx(-float(logprobs[kept].mean()), rel=1e-3)


def test_a_credit_counts_trained_turns_alone(tokenizer):
    """Its trajectories are those that carry loss; quantities of a group see every turn."""
    episode = without(trajectory(*SAID), 1)
    example = encode_example(episode, Renderer(tokenizer), None)

    assert [turn.action.text for turn in example.trajectories[0].turns] == [SAID[0], *SAID[2:]]
    assert len(example.whole[0].turns) == 5
    assert Renderer(tokenizer).encode(episode, every_turn=True).turns == 5


def test_a_masked_prefix_leaves_a_turn_that_carries_loss(tokenizer):
    """The sides begin with two turns. The later ones of the first side are off, so its second turn keeps its loss."""
    chosen = without(trajectory("north", "south", "east", task="t/0"), 2)
    rejected = without(trajectory("north", "south", "west", task="t/0"), 0)
    found = encode_example(PreferencePair(chosen, rejected), Renderer(tokenizer), None, "mask")

    assert [set(side.loss_turns) for side in found.sides] == [{1}, {1, 2}]


def test_what_was_read_for_a_turn_without_loss_carries_none(tokenizer):
    """Under `loss_on: all`, the answer and the observation before it."""
    whole = encode_example(trajectory(*SAID), Renderer(tokenizer), None, loss_on="all").chosen
    part = encode_example(without(trajectory(*SAID), 1), Renderer(tokenizer), None, loss_on="all").chosen

    assert part.turn == tuple(NO_TURN if turn == 1 else turn for turn in whole.turn)


def test_an_empty_answer_is_a_turn_without_loss(tokenizer):
    """It stays in the sequence, with the token that closes it."""
    encoded = Renderer(tokenizer).encode(trajectory("north", "", "up"))

    assert sorted(set(encoded.loss_turns)) == [0, 2]
    assert Renderer(tokenizer).encode(trajectory("north", "", "up"), every_turn=True).turns == 3


def test_a_side_without_loss_is_named(tokenizer):
    """By its name, and why."""
    pair = PreferencePair(trajectory("north"), without(trajectory("up", ""), 0))
    with pytest.raises(
        DataError, match=r"rejected has no turn that carries loss: of 2 turns 1 are empty or cut inside, 1"
    ):
        encode_example(pair, Renderer(tokenizer), None)
    with pytest.raises(
        DataError, match=r"task 't/0' has no turn that carries loss: each is empty, cut, or marked"
    ):
        Renderer(tokenizer).encode(without(trajectory("up"), 0))


def test_the_field_is_stored_where_it_says_something():
    """Lines of earlier files are read and written as they were."""
    plain, marked = trajectory("north", "up"), without(trajectory("north", "up"), 0)

    assert "trained" not in json.dumps(trajectory_to_dict(plain))
    assert trajectory_from_dict(trajectory_to_dict(marked)) == marked
    assert [turn.get("trained") for turn in trajectory_to_dict(marked)["turns"]] == [False, None]


def test_marked_rows_and_turns_in_the_prompt_are_one_training(train):
    """A row of the OpenAI format, with `weight: 0` on all answers but the last."""

    def said(text, **mark):
        return {"role": "assistant", "content": text, **mark}

    user = {"role": "user", "content": "u"}
    marked = [user, said("go north", weight=0), user, said("take lamp", weight=0), user, said("up", weight=1)]
    plain = [{key: value for key, value in each.items() if key != "weight"} for each in marked]
    rows = [{"messages": marked}], [{"prompt": plain[:-1], "completion": plain[-1:]}]

    assert_close(*(first(train(each, loss="sft")) for each in rows), rtol=1e-4, atol=1e-6)
