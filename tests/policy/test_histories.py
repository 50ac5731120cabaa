"""Shortened histories: an episode is a sequence for each turn, what the policy saw then, and stays one trajectory."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from perturn.chat.tokens import NO_TURN, Encoded, Renderer
from perturn.credit import CREDITS
from perturn.data.records import trajectory_from_dict, trajectory_to_dict
from perturn.episodes.play_many import Job, episode
from perturn.episodes.prompts import as_seen
from perturn.errors import DataError
from perturn.losses import LOSSES, TurnLogprobs
from perturn.policy.credit_weights import weigh_all
from perturn.policy.examples import Example, check_lengths, encode_example
from perturn.policy.logprobs import action_logprobs
from perturn.policy.packing import Collator, both_sides, collate, count_tokens, lay_out
from perturn.policy.reference import compute_logprobs
from perturn.types import Action, EpisodeProtocol, Observation, PreferencePair, Task, Trajectory, Turn

from .training import turn_by_turn


class Hall:
    """A hall of doors; each answer lists other commands, and another word than 'north' is not understood."""

    name = "hall-1.0"

    def reset(self, task, seed):
        """Stand at door 0."""
        self.door = 0
        return Observation("Find the exit.", admissible=("north", "wait"))

    def step(self, action):
        """Go on, or not."""
        self.door += 1
        known = action == "north"
        return Observation(f"Door {self.door}.", valid=known, admissible=("north", f"open {self.door}"))


def play(protocol, actions, conversation="t"):
    """(prompts, trajectory) of an episode in which the policy writes these actions."""
    steps = episode(Hall(), Job(Task(conversation), seed=0), protocol=protocol)
    prompts = [next(steps)]
    try:
        for action in actions:
            prompts.append(steps.send(action))
    except StopIteration as end:
        return prompts, end.value
    raise AssertionError("the protocol allows more turns than there are actions")


def rules(turns, **own):
    return EpisodeProtocol("p", **{"format": "action", "max_turns": turns, "system": "Play."} | own)


def parts(encoded):
    """Ids and turns of each sequence."""
    return [(list(encoded.ids[at]), list(encoded.turn[at])) for at in encoded.sequences]


@st.composite
def said(draw, renderer):
    """An action as a text, as sampled tokens, or as tokens that a limit cut."""
    text = draw(st.sampled_from(["Action: north", "Action: open 1", "no idea", "Action: north\n\n"]))
    if draw(st.booleans()):
        return Action(text)
    ids = renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
    ended = draw(st.booleans())
    return Action(text, token_ids=tuple([*ids, renderer.end_id] if ended else ids), ended=ended)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.integers(0, 4), st.booleans())
def test_training_sees_what_the_engine_was_asked(renderer, data, history, listed):
    """Each sequence is the ids of that turn's prompt and then the action, which alone carries loss.

    Also from the store, and where the whole history was shown: then the last sequence is the only one.
    """
    actions = data.draw(st.lists(said(renderer), min_size=1, max_size=6))
    prompts, played = play(rules(len(actions), history=history, list_admissible=listed), actions)
    asked = Renderer(renderer.tokenizer)
    expected = []
    for index, (prompt, action) in enumerate(zip(prompts, actions, strict=True)):
        begun = asked.prompt_ids(prompt)
        own = renderer.encode(replace(played, turns=(Turn(prompt.observation, action),), history=None))
        wrote = [token for token, turn in zip(own.ids, own.turn, strict=True) if turn == 0]
        expected.append((begun + wrote, [NO_TURN] * len(begun) + [index] * len(wrote)))

    found = parts(renderer.encode(trajectory_from_dict(trajectory_to_dict(played))))

    if played.is_one_sequence:
        assert [ids for ids, _ in found] == [expected[-1][0]]
    else:
        assert found == expected


def test_an_episode_is_recorded_once_and_seen_in_parts():
    """Turn 3 of 4 with sight of one turn: the task, what is left out, one turn without its list, the newest with it."""
    prompts, played = play(rules(4, history=1, list_admissible=True), [Action("Action: north")] * 4)

    seen = as_seen(played, 3)

    assert [turn.observation for turn in seen] == [prompts[3].turns[0].observation, prompts[3].observation]
    assert seen[0].observation[0]["content"] == "Find the exit.\n\n(2 turns are left out here.)\n\nDoor 2."
    assert seen[1].observation[0]["content"] == "Door 3.\nAdmissible commands:\nnorth\nopen 3"
    assert played.turns[2].observation[0]["content"] == "Door 2.\nAdmissible commands:\nnorth\nopen 2"


def test_a_turn_that_heard_nothing_is_told_what_was_left_out(renderer):
    """A row of others, in which two actions follow each other: the user says what the task was."""
    heard = [({"role": "user", "content": "Find the exit."},), (), ()]
    played = Trajectory(Task("t"), tuple(Turn(each, Action("north")) for each in heard), history=0)

    last = as_seen(played, 2)

    assert last[0].observation == (
        {"role": "user", "content": "Find the exit.\n\n(2 turns are left out here.)\n\n"},
    )
    assert renderer.encode(played).turns == 3


def test_a_turn_that_does_not_fit_is_dropped_with_all_later_ones(renderer):
    """The third turn's sequence is the longest, since its answer is; the fourth one would fit by itself."""
    actions = [Action("Action: north"), Action("Action: north"), Action("Action: " + "open " * 60)]
    _, played = play(rules(4, history=0), [*actions, Action("Action: north")])
    whole = renderer.encode(played)
    lengths = [len(ids) for ids, _ in parts(whole)]

    cut = renderer.encode(played, max_length=lengths[2] - 1)

    assert lengths[3] < lengths[2] == whole.longest
    assert (cut.turns, cut.dropped_turns, whole.dropped_turns) == (2, 2, 0)
    assert parts(cut) == parts(whole)[:2]
    assert parts(renderer.encode(played, max_length=lengths[2])) == parts(whole)
    check_lengths([Example(whole)], lengths[2])
    with pytest.raises(DataError, match=f"the longest sequence has {lengths[2]} tokens"):
        check_lengths([Example(whole)], lengths[2] - 1)
    with pytest.raises(DataError, match=f"first turn ends at token {lengths[0]}, but max_length is 5"):
        renderer.encode(played, max_length=5)


def test_a_masked_prefix_takes_whole_sequences_out(renderer):
    """Both sides do the same in their first two turns; what carries no loss is not computed."""
    same, protocol = [Action("Action: north")] * 2, rules(4, history=1)
    both = [
        play(protocol, [*same, Action(text), Action("Action: wait")])[1]
        for text in ("Action: open 1", "Action: wait")
    ]
    example = encode_example(PreferencePair(*both), renderer, None, "mask")

    assert [sorted(set(side.loss_turns)) for side in example.sides] == [[2, 3], [2, 3]]
    assert [len(one.turns) for one in example.trajectories] == [2, 2]
    kept = [parts(side)[turn] for side in example.sides for turn in (2, 3)]
    assert len(lay_out(example.sides, share=False)["ids"]) == sum(len(ids) - 1 for ids, _ in kept)


VOCABULARY = 48


@pytest.fixture(scope="module")
def model():
    """A very small policy."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def reference(model):
    """The policy before."""
    torch.manual_seed(1)
    return LlamaForCausalLM(model.config).double().eval()


def as_samples(encoded):
    """One sequence -> a sequence for each turn, which ends with it and carries its loss alone."""
    ends = [
        max(index for index, found in enumerate(encoded.turn) if found == turn) + 1
        for turn in sorted(set(encoded.loss_turns))
    ]
    turn = [
        found if last < end and found == max(encoded.turn[:end]) else NO_TURN
        for end in ends
        for last, found in enumerate(encoded.turn[:end])
    ]
    ids = [token for end in ends for token in encoded.ids[:end]]
    starts = tuple(accumulate(ends[:-1], initial=0))
    return replace(encoded, ids=tuple(ids), turn=tuple(turn), role=("user",) * len(ids), starts=starts)


@st.composite
def conversations(draw):
    """A trajectory of random tokens: a prompt, then turns of some tokens heard and some said."""
    word = st.integers(0, VOCABULARY - 1)
    ids = draw(st.lists(word, min_size=1, max_size=40))
    turn = [NO_TURN] * len(ids)
    for index in range(draw(st.integers(1, 5))):
        heard = draw(st.lists(word, min_size=1, max_size=8))
        wrote = draw(st.lists(word, min_size=1, max_size=4))
        ids += heard + wrote
        turn += [NO_TURN] * len(heard) + [index] * len(wrote)
    return Encoded(tuple(ids), tuple(turn), ("user",) * len(ids))


def recorded(side, name="t"):
    """A trajectory with as many turns as carry loss, for a credit to weigh."""
    return Trajectory(Task(name), tuple(Turn((), Action("a")) for _ in range(side.turns)))


def weighed(sides, loss, reference):
    """An example as training has it before its first step."""
    example = Example(*sides, trajectories=tuple(map(recorded, sides)))
    if loss.traits.needs_reference or "reference" in loss.credit.needs:
        with torch.no_grad():
            example = replace(example, reference=tuple(compute_logprobs(reference, list(sides))))
    return example


def results(model, examples, loss, batch=None):
    """(loss of each row, log-probabilities, gradients of the mean) of a batch of examples."""
    batch = collate(examples) if batch is None else batch
    model.zero_grad()
    logprobs = action_logprobs(model, batch)
    chosen, rejected = both_sides(batch, logprobs)
    step = {"step": batch["statistic"]} if "statistic" in batch else {}
    value = loss(chosen, rejected, **step)
    value.mean().backward()
    return value.detach(), logprobs.detach(), [each.grad.clone() for each in model.parameters()]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, atol=1e-5, rtol=1e-5)


NAMES = ["sft", "dpo", "dmpo", "dil", "tlm-dpo", "tlm-dre"]
quickly = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("name", NAMES)
@quickly
@given(sides=st.lists(conversations(), min_size=2, max_size=2))
def test_one_sequence_and_a_sequence_a_turn_are_equal_to_train_on(model, reference, name, sides):
    """Losses, log-probabilities, weights and gradients, with the turns' sequences laid out as a tree or each alone."""
    loss = LOSSES[name]()
    sides = sides[: 1 + loss.traits.needs_rejected]
    (one,) = weigh_all([weighed(sides, loss, reference)], loss, loss.credit)
    (many,) = weigh_all([weighed(list(map(as_samples, sides)), loss, reference)], loss, loss.credit)
    alone = collate([many]) | lay_out(many.sides, share=False)

    expected = results(model, [one], loss)

    assert_close(many.weight, one.weight, atol=1e-5, rtol=1e-5)
    assert_close(many.reference, one.reference, atol=1e-5, rtol=1e-5)
    assert_same(results(model, [many], loss), expected)
    assert_same(results(model, [many], loss, alone), expected)


@quickly
@given(side=conversations(), gap=st.floats(-0.5, 0.5))
def test_ppo_clip_reads_one_trajectory(model, side, gap):
    """Advantages and behavior are by turn and token of the trajectory, whatever its sequences."""
    found = []
    for each in (side, as_samples(side)):
        batch = collate([Example(each)])
        logprobs = action_logprobs(model, batch)
        parts = {"turn": batch["turn"], "trajectory": batch["trajectory"]}
        weight = torch.linspace(-1.0, 1.0, each.turns)
        sampled = TurnLogprobs(logprobs, None, weight=weight, behavior=logprobs.detach() + gap, **parts)
        value = LOSSES["ppo-clip"](ratio="turn", aggregate="turn_mean")(sampled)
        assert value.shape == (1,)
        found.append([value, *torch.autograd.grad(value.sum(), model.parameters())])

    assert_same(*found)


@quickly
@given(
    rows=st.lists(conversations(), min_size=2, max_size=4, unique_by=lambda row: row.ids), seed=st.randoms()
)
def test_duplicating_reordering_and_padding_rows_change_nothing(model, reference, rows, seed):
    """The mean over rows and its gradient are those of the trajectories; a row that is none is left out."""
    loss = LOSSES["tlm-dre"]()
    pairs = [weighed([as_samples(one), as_samples(rows[0])], loss, reference) for one in rows]
    pairs = weigh_all(pairs, loss, loss.credit)
    value, _, gradients = results(model, pairs, loss)
    shuffled = list(pairs)
    seed.shuffle(shuffled)
    (padded,) = Collator(token_budget=10_000)([None, *pairs, None])["packs"]

    for other in (collate(pairs * 2), collate(shuffled), padded):
        again, _, same = results(model, [], loss, other)
        assert_close(again.mean(), value.mean(), atol=1e-5, rtol=1e-5)
        assert_same(same, gradients)


@quickly
@given(side=conversations())
def test_a_history_that_is_kept_costs_one_sequence(side):
    """However many turns: one segment, of the tokens of the longest sequence; alone they grow with their square."""
    many = as_samples(side)
    tree, alone = lay_out([many]), lay_out([many], share=False)
    last = max(place for place, turn in enumerate(side.turn) if turn != NO_TURN)

    assert tree["segments"].tolist() == [[0, last, last]]
    assert len(alone["ids"]) == sum(at.stop - at.start - 1 for at in many.sequences)
    assert count_tokens([many]) == count_tokens([side])


def test_the_credit_of_a_trajectory_counts_its_turns_not_its_sequences():
    """DMPO's discount with T = 3, gamma 0.5: (1, 0.5·(1−0.25)/(1−0.125), 0.25·(1−0.5)/(1−0.125))."""
    side = as_samples(Encoded((1, 2, 3, 4, 5, 6), (-1, 0, -1, 1, -1, 2), ("user",) * 6))
    (example,) = weigh_all(
        [Example(side, trajectories=(recorded(side),))], LOSSES["sft"](), CREDITS["discount"](gamma=0.5)
    )

    assert len(side.starts) == 3
    assert_close(example.weight[0].tolist(), [1.0, 0.428571, 0.142857], atol=1e-6, rtol=0)


def test_the_trainer_takes_many_sequences_as_it_takes_one(make_trainer):
    """The same text in both forms, three steps: equal weights. A turn that is recalled as it was is written twice."""
    said = [["go north", "open the box", "take key"], ["go south", "wait", "sing"], ["go north", "sing"]]
    one = [
        Trajectory(
            Task("t"),
            tuple(
                Turn(({"role": "user", "content": f"room {i}"},), Action(text))
                for i, text in enumerate(texts)
            ),
        )
        for texts in said
    ]
    many = [turn_by_turn(each) for each in one]
    trained = []
    for episodes in (one, many):
        trainer = make_trainer(
            [PreferencePair(episodes[0], other) for other in episodes[1:]],
            loss="tlm-dre",
            per_device_train_batch_size=1,
            max_steps=3,
            learning_rate=1e-3,
        )
        trainer.train()
        trained.append(trainer)

    sides = [side for row in trained[1].train_dataset.rows for side in row.sides]
    assert [len(side.starts) for side in sides] == [3, 3, 3, 2]
    for found, expected in zip(trained[1].model.parameters(), trained[0].model.parameters(), strict=True):
        assert_close(found, expected, atol=1e-5, rtol=0)
