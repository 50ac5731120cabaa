"""Episodes of several sequences: each generated token is trained once, in the context in which it was sampled."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from perturn.chat.tokens import NO_TURN
from perturn.errors import DataError
from perturn.formats.trl_rows import to_trl
from perturn.losses import LOSSES, TurnLogprobs
from perturn.methods.infopo.feedback import feedback_gains
from perturn.policy.examples import Example, encode_example
from perturn.policy.logprobs import action_logprobs
from perturn.policy.packing import collate, count_tokens, lay_out
from perturn.quantities.answer_turns import branches
from perturn.types import OPENS, Action, Opening, PreferencePair, Task, Trajectory, Turn

SYSTEM = ({"role": "system", "content": "Find the key. " * 6},)
HELPER = Opening(({"role": "system", "content": "You sum up what others did."},))


def turn(text, said, **place):
    """A turn that hears a text and answers it."""
    return Turn(({"role": "user", "content": text},), Action(said), **place)


def episode(*turns):
    """An episode under the system text, with a gold answer."""
    return Trajectory(Task("t/1", data={"answer": "the hall"}), turns, prompt=SYSTEM)


TREE = episode(
    turn("a room", "go north"),
    turn("a hall", "open the box"),
    turn("sum up", "a hall with a box", follows=OPENS, opening=HELPER),
    turn("shorter", "a hall", follows=2),
    turn("a key", "take key", follows=1),
    turn("a hall, again", "sing", follows=0),
)
"""A helper's conversation of two turns in the middle, and at its end a retry of the second turn."""
LINES = [(0, 1), (2, 3), (0, 1, 4), (0, 5)]
"""Turns of each sequence."""


def alone(turns):
    """The conversation of a sequence as an episode of its own."""
    own = tuple(replace(TREE.turns[at], follows=None, opening=None) for at in turns)
    return replace(TREE, turns=own, prompt=HELPER.prompt if turns == (2, 3) else SYSTEM)


@pytest.fixture(scope="module")
def model(renderer):
    """A very small policy in float64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(renderer.tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).double().eval()


def test_each_turn_carries_loss_once_in_the_context_in_which_it_was_taken(renderer):
    """Each sequence has the tokens of its conversation by itself; the turns are in the order of the episode."""
    tree = renderer.encode(TREE)

    assert [tree.ids[span] for span in tree.sequences] == [renderer.encode(alone(line)).ids for line in LINES]
    own = [sorted(set(tree.turn[span]) - {NO_TURN}) for span in tree.sequences]
    assert own == [[0, 1], [2, 3], [4], [5]]
    assert tree.loss_turns == sorted(tree.loss_turns)
    wrote = {turn: [] for turn in range(6)}
    for token, at in zip(tree.ids, tree.turn, strict=True):
        wrote.get(at, []).append(token)
    assert [renderer.tokenizer.decode(ids).strip() for ids in wrote.values()] == [
        f"{turn.action.text}<|im_end|>" for turn in TREE.turns
    ]


def test_what_sequences_begin_with_is_computed_once(renderer):
    """The packed tokens are those of the tree, without the beginnings that it repeats."""
    tree = renderer.encode(TREE)

    assert count_tokens([tree]) < len(tree.ids) - 2 * len(renderer.encode(alone((0,))).ids)


def gradients(model, sides, weights, share=True):
    """Sum of the token losses of trajectories, and its gradients, with the weights of the turns of each."""
    batch = collate([Example(side) for side in sides])
    batch |= lay_out(sides, share=share)
    logprobs = action_logprobs(model, batch)
    shift = torch.linspace(-0.3, 0.3, len(model.get_output_embeddings().weight), dtype=torch.float64)
    tokens = torch.cat(
        [torch.tensor([t for t, at in zip(s.ids, s.turn, strict=True) if at != NO_TURN]) for s in sides]
    )
    sampled = TurnLogprobs(
        logprobs,
        None,
        turn=batch["turn"],
        trajectory=batch["trajectory"],
        weight=torch.tensor(weights, dtype=torch.float64),
        behavior=logprobs.detach() + shift[tokens],
    )
    value = LOSSES["ppo-clip"](aggregate="token_sum")(sampled).sum()
    return [value, *torch.autograd.grad(value, model.parameters())]


@pytest.mark.parametrize("share", [True, False])
def test_an_episode_trains_as_the_sum_of_its_sequences(renderer, model, share):
    """Loss and gradient in float64: a helper, a retry; with and without shared beginnings."""
    weights = [1.0, -0.5, 2.0, 0.25, -1.5, 0.75]
    carry = [[0, 1], [2, 3], [4], [5]]
    parts = []
    for line, own in zip(LINES, carry, strict=True):
        side = renderer.encode(alone(line))
        skipped = len(line) - len(own)
        side = replace(side, turn=tuple(at if at >= skipped else NO_TURN for at in side.turn))
        parts.append(gradients(model, [side], [weights[at] for at in own], share))

    whole = gradients(model, [renderer.encode(TREE)], weights, share)

    assert_close(
        whole, [sum(each) for each in zip(*parts, strict=True)], atol=5e-6, rtol=1e-5
    )  # norms are float32


def test_the_context_of_a_turn_holds_the_ids_that_were_sampled(renderer):
    """A retry follows a turn whose sampled ids are not those that its text has."""
    ids = (*renderer.tokenizer("g o", add_special_tokens=False)["input_ids"], renderer.end_id)
    first = replace(TREE.turns[0], action=Action("go", ids, (-1.0,) * len(ids)))
    played = replace(TREE, turns=(first, *TREE.turns[1:]))

    tree = renderer.encode(played)

    begun = [tree.ids[span] for span in tree.sequences]
    prompt = len(renderer.encode(alone((0,))).ids) - len(
        [at for at in renderer.encode(alone((0,))).turn if at != NO_TURN]
    )
    assert [begun[at][prompt : prompt + len(ids)] for at in (0, 2, 3)] == [ids] * 3


def test_a_turn_that_does_not_fit_takes_along_those_that_extend_it(renderer):
    """The second turn is long: it is dropped with the fifth, which follows it; a helper and a retry stay."""
    second = replace(TREE.turns[1], action=Action("open the box " * 40))
    played = replace(TREE, turns=(TREE.turns[0], second, *TREE.turns[2:]))
    limit = renderer.encode(alone((0, 5))).longest

    cut = renderer.encode(played, limit)

    assert sorted(set(cut.loss_turns)) == [0, 2, 3, 5]
    assert (cut.dropped_turns, cut.longest <= limit) == (2, True)


def test_a_row_keeps_the_turns_that_carry_loss(renderer):
    """A turn that is not to be trained lies between turns that follow each other."""
    silent = replace(TREE.turns[1], trained=False)
    played = replace(TREE, turns=(TREE.turns[0], silent, *TREE.turns[2:]))

    example = encode_example(played, renderer, None)

    assert [turn.action.text for turn in example.trajectories[0].turns] == [
        turn.action.text for turn in TREE.turns if turn.action.text != "open the box"
    ]
    assert example.whole == (played,)


def test_a_pair_may_be_of_trees(renderer):
    """Both sides, with the turns in which they begin alike masked."""
    other = replace(TREE, turns=(*TREE.turns[:5], turn("a hall, again", "dance", follows=0)))

    example = encode_example(PreferencePair(TREE, other), renderer, None, "mask")

    assert [sorted(set(side.loss_turns)) for side in example.sides] == [[5], [5]]


def test_an_answer_is_asked_in_the_context_of_each_turn(renderer):
    """Before each turn, and after the last one."""
    found = branches(renderer, TREE, "Answer: {answer}")

    assert len(found) == len(TREE.turns) + 1
    for at, line in [(1, (0, 1)), (3, (2, 3)), (4, (0, 1, 4)), (5, (0, 5))]:
        assert found[at] == branches(renderer, alone(line), "Answer: {answer}")[len(line) - 1]
    assert found[6] == branches(renderer, alone((0, 5)), "Answer: {answer}")[2]


def test_feedback_is_of_the_reply_that_a_turn_heard(renderer, model):
    """Turn 0 was answered twice, by turns 1 and 5, so that its gain is their mean; the helper's is one by itself."""

    def gains(*episodes):
        return feedback_gains(model, renderer, episodes, "nothing")

    (found,) = gains(TREE)
    (main,), (helper,), (retry,) = gains(alone((0, 1, 4))), gains(alone((2, 3))), gains(alone((0, 5)))

    assert_close(found[0], (main[0] + retry[0]) / 2, atol=1e-6, rtol=0)
    assert_close([found[1], found[2]], [main[1], helper[0]], atol=1e-6, rtol=0)
    assert all(each != each for each in found[3:])


def test_an_episode_of_several_conversations_is_no_row_of_trl():
    """A row holds one conversation."""
    with pytest.raises(DataError, match=r"not one conversation.*the agent began further conversations"):
        to_trl(TREE)
