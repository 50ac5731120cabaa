"""What the world's replies changed in the turns after them: packed passes say what plain passes a turn say."""

import logging
from dataclasses import replace
from math import isnan, nan

import pytest
import torch

from perturn.chat.tokens import NO_TURN, Renderer
from perturn.errors import ConfigError, DataError, ModelError
from perturn.methods.infopo.feedback import feedback_gains, masked_turns
from perturn.policy.packing import lay_out
from perturn.types import Action, Status, Task, Trajectory, Turn
from support.chat_templates import ALTERNATING
from support.walks import REMEMBERS, SECOND, played

NOTHING = "No information found."


def episode(turns, task="q", sample=0, **changes):
    """An episode of so many turns, each with something to read."""
    read = [f"Page {number} of {task}. " + "It lies on a river. " * (3 + number) for number in range(turns)]
    return Trajectory(
        Task(task),
        tuple(
            Turn(({"role": "user", "content": text},), Action(f"Thought: {sample}\nAction: search[{number}]"))
            for number, text in enumerate(read)
        ),
        prompt=({"role": "system", "content": "You answer questions. " * 20},),
        sample=sample,
        **changes,
    )


EPISODES = [episode(4), episode(1, sample=1), episode(2, task="r"), episode(3, sample=2)]


def mean_logprob(model, tokenizer, messages, text):
    """Of a turn after messages: text, tokens and a pass of its own, none of them ours."""
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    read = tokenizer(asked, add_special_tokens=False)["input_ids"]
    said = tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logprobs = model(torch.tensor([read + said])).logits[0].double().log_softmax(-1)
    return sum(float(logprobs[len(read) + j - 1, token]) for j, token in enumerate(said)) / len(said)


def plain(model, tokenizer, trajectory, t):
    """The gain of the reply to a turn."""
    messages = list(trajectory.prompt)
    for turn in trajectory.turns[: t + 1]:
        messages += [*turn.observation, {"role": "assistant", "content": turn.action.text}]
    after = trajectory.turns[t + 1]
    told = mean_logprob(model, tokenizer, [*messages, *after.observation], after.action.text)
    blind = mean_logprob(
        model, tokenizer, [*messages, {"role": "user", "content": NOTHING}], after.action.text
    )
    return told - blind


@pytest.mark.parametrize("budget", [1, 100_000])
def test_they_are_those_of_two_plain_passes_a_turn(renderer, tokenizer, tiny_model, budget):
    """Whatever shares the pack; float32 rounding is below 1e-5. After the last turn nothing is known."""
    found = feedback_gains(tiny_model, renderer, EPISODES, NOTHING, budget)

    assert [len(each) for each in found] == [4, 1, 2, 3]
    for one, ours in zip(EPISODES, found, strict=True):
        expected = [plain(tiny_model, tokenizer, one, t) for t in range(len(one.turns) - 1)]
        assert ours == pytest.approx([*expected, nan], abs=1e-5, nan_ok=True)
    assert len({round(gain, 4) for gain in found[0][:3]}) == 3


def test_a_reply_that_is_the_placeholder_changes_nothing(renderer, tiny_model):
    """0 to rounding, and the others are what they are."""
    one = episode(3)
    said = replace(one.turns[1], observation=({"role": "user", "content": NOTHING},))
    one = replace(one, turns=(one.turns[0], said, one.turns[2]))

    first, second, _ = feedback_gains(tiny_model, renderer, [one], NOTHING)[0]

    assert first == pytest.approx(0, abs=1e-6)
    assert abs(second) > 1e-3


@pytest.mark.parametrize("history", [None, 0, 1, 2])
def test_only_the_newest_reply_is_masked(renderer, history):
    """What the policy would have read, with a history shortened as it was; the turn itself is as it was sampled."""
    one = episode(4, history=history)

    found = masked_turns(renderer, one, NOTHING)

    assert list(found) == [1, 2, 3]
    for t, masked in found.items():
        text = renderer.tokenizer.decode(masked.ids)
        assert text.count(NOTHING) == 1
        assert text.endswith(
            f"{NOTHING}<|im_end|>\n<|im_start|>assistant\nThought: 0\nAction: search[{t}]<|im_end|>"
        )
        assert f"Page {t}" not in text
        kept = range(t) if history is None else [0, *range(max(1, t - history), t)]
        assert [f"Page {k} " in text for k in range(t)] == [k in kept for k in range(t)]
        said = [token for token, turn in zip(masked.ids, masked.turn, strict=True) if turn != NO_TURN]
        assert renderer.tokenizer.decode(said) == f"Thought: 0\nAction: search[{t}]<|im_end|>"


@pytest.mark.parametrize("history", [0, 1])
def test_a_shortened_history_is_read_as_the_policy_read_it(renderer, tokenizer, tiny_model, history):
    """By plain passes over the messages of each turn."""
    one = episode(3, history=history)
    posed, last = one.turns[0], one.turns[1]

    found = feedback_gains(tiny_model, renderer, [one], NOTHING)[0]

    if history == 1:
        before = [*one.prompt, *posed.observation, {"role": "assistant", "content": posed.action.text}]
        told, blind = [*before, *last.observation], [*before, {"role": "user", "content": NOTHING}]
    else:
        opening = f"{posed.observation_text}\n\n(1 turn is left out here.)\n\n"
        told, blind = (
            [*one.prompt, {"role": "user", "content": opening + text}]
            for text in (last.observation_text, NOTHING)
        )
    gain, other = (mean_logprob(tiny_model, tokenizer, seen, last.action.text) for seen in (told, blind))
    assert found[0] == pytest.approx(gain - other, abs=1e-5)
    assert isnan(found[2])


def test_sampled_tokens_are_asked_for_as_they_are(renderer, tiny_model):
    """Not the tokens that their text would have: a policy may write a text in others."""
    ids = (*tuple(renderer.tokenizer("s")["input_ids"] + renderer.tokenizer("earch[1]")["input_ids"]), 2)
    assert ids[:-1] != tuple(renderer.tokenizer("search[1]")["input_ids"])
    one = episode(2)
    turn = replace(
        one.turns[1], action=Action("search[1]", token_ids=ids, logprobs=(-1.0,) * len(ids), ended=True)
    )

    (masked,) = masked_turns(renderer, replace(one, turns=(one.turns[0], turn)), NOTHING).values()

    assert masked.ids[-len(ids) :] == ids
    assert masked.turn[-len(ids) - 1 :] == (NO_TURN,) + (1,) * len(ids)


def test_results_of_tools_are_masked_one_by_one(renderer):
    """Each keeps its role and the call that it belongs to."""
    one = episode(2)
    heard = tuple({"role": "tool", "content": f"result {i}", "tool_call_id": f"{i}"} for i in range(2))
    one = replace(one, turns=(one.turns[0], replace(one.turns[1], observation=heard)))

    (masked,) = masked_turns(renderer, one, NOTHING).values()

    text = renderer.tokenizer.decode(masked.ids)
    assert text.count(f"<|im_start|>tool\n{NOTHING}<|im_end|>") == 2
    assert "result" not in text


def test_where_nothing_was_said_there_is_nothing_to_mask(renderer, tiny_model):
    """Two turns that follow each other; and a FAILED episode, or one of a turn, is not asked about."""
    silent = episode(3)
    silent = replace(
        silent, turns=(silent.turns[0], replace(silent.turns[1], observation=()), silent.turns[2])
    )
    failed = replace(episode(2, sample=1), status=Status.FAILED)
    empty = replace(episode(1, sample=2), turns=())

    found = feedback_gains(tiny_model, renderer, [silent, failed, empty], NOTHING)

    assert [isnan(gain) for gain in found[0]] == [True, False, True]
    assert [isnan(gain) for gain in found[1]] == [True, True]
    assert found[2] == []


def test_beyond_the_models_context_nothing_is_known(renderer, tiny_model, caplog):
    """And it is said; what fits is as it was."""
    whole = feedback_gains(tiny_model, renderer, EPISODES, NOTHING)
    limit = len(renderer.encode(replace(EPISODES[0], turns=EPISODES[0].turns[:2])).ids)
    tiny_model.config.max_position_embeddings = limit
    caplog.set_level(logging.WARNING)

    found = feedback_gains(tiny_model, renderer, EPISODES, NOTHING)

    assert found[0][0] == pytest.approx(whole[0][0], abs=1e-5)
    assert all(map(isnan, found[0][1:]))
    assert f"beyond the model's context of {limit} tokens" in caplog.text


def test_what_is_longer_without_its_reply_is_not_known_either(renderer, tiny_model):
    """A turn that fits as it was, and not behind the placeholder; and one that fits behind the placeholder alone."""
    one = episode(2)
    tiny_model.config.max_position_embeddings = len(renderer.encode(one).ids)

    assert not isnan(feedback_gains(tiny_model, renderer, [one], NOTHING)[0][0])
    assert isnan(feedback_gains(tiny_model, renderer, [one], NOTHING * 20)[0][0])
    tiny_model.config.max_position_embeddings -= 1
    assert isnan(feedback_gains(tiny_model, renderer, [one], NOTHING)[0][0])


@pytest.mark.parametrize("template", [REMEMBERS, SECOND])
def test_a_template_that_remembers_is_rendered_whole(tokenizer, template):
    """A masked turn reads as the episode that ends with it would."""
    renderer = Renderer(tokenizer, template)
    one = played(9, lamp=(1, 6))

    for t, masked in masked_turns(renderer, one, NOTHING).items():
        heard = replace(one.turns[t], observation=({"role": "user", "content": NOTHING},))
        assert masked.ids == renderer.encode(replace(one, turns=(*one.turns[:t], heard))).ids


def test_a_context_without_room_for_a_turn_leaves_all_open(renderer, tiny_model):
    tiny_model.config.max_position_embeddings = 5

    found = feedback_gains(tiny_model, renderer, EPISODES, NOTHING)

    assert all(isnan(gain) for of_one in found for gain in of_one)


def test_a_pass_shares_what_the_contexts_begin_with(renderer):
    """The episode once, and of each masked turn no more than the placeholder and itself."""
    one = episode(8)
    masked = list(masked_turns(renderer, one, NOTHING).values())
    own = max(len(renderer.tokenizer(NOTHING)["input_ids"]) + each.turn.count(7) for each in masked) + 40

    computed = len(lay_out([renderer.encode(one), *masked])["ids"])

    assert computed < len(renderer.encode(one).ids) + len(masked) * own
    assert computed < 0.5 * (len(renderer.encode(one).ids) + sum(len(each.ids) for each in masked))


def test_a_template_may_read_roles_that_alternate_alone(tokenizer, tiny_model):
    """A masked turn stands where the turn stood."""
    expected = feedback_gains(tiny_model, Renderer(tokenizer), EPISODES, NOTHING)

    found = feedback_gains(tiny_model, Renderer(tokenizer, ALTERNATING), EPISODES, NOTHING)

    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("placeholder", ["<|im_end|>", "a<|im_end|>\n<|im_start|>user\nb"])
def test_a_placeholder_is_a_plain_text(renderer, tiny_model, placeholder):
    with pytest.raises(
        ConfigError, match=r"credit\.placeholder must be text without control tokens, got '.*im_end"
    ):
        feedback_gains(tiny_model, renderer, EPISODES, placeholder)


def test_a_turn_that_is_no_text_is_named(renderer, tiny_model):
    """And is not taken for one that is too long."""
    one = episode(2)
    broken = replace(one, turns=(one.turns[0], replace(one.turns[1], action=Action("\ud800"))))

    with pytest.raises((DataError, ModelError)):
        feedback_gains(tiny_model, renderer, [broken], NOTHING)
