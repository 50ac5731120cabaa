import copy
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from perturn.chat.tokens import NO_TURN
from perturn.engines.local.engine import LocalEngine
from perturn.episodes.play_many import Job, play
from perturn.errors import ContextFull, RunError
from perturn.policy.logprobs import action_logprobs
from perturn.policy.packing import lay_out
from perturn.types import Action, EpisodeProtocol, Prompt, Sampling, Turn

from .playing import fed

SAMPLED = Sampling(temperature=1.0, max_new_tokens=6)


@pytest.fixture
def ends_turns(tiny_model, renderer):
    """A tiny policy that ends about one turn in three at each token."""
    torch.manual_seed(1)
    bias = torch.zeros(tiny_model.config.vocab_size)
    bias[renderer.end_id] = math.log(0.5 * tiny_model.config.vocab_size)
    tiny_model.lm_head.bias = torch.nn.Parameter(bias)
    tiny_model.lm_head.weight.data *= 0.3
    return tiny_model


def user(text):
    return ({"role": "user", "content": text},)


def prompt(name, turns=(), heard="go", seed=0):
    system = ({"role": "system", "content": "Play."},)
    return Prompt(system, tuple(turns), user(heard), seed, name)


OPENINGS = ["hi", "a much longer observation, with many words in it. " * 3, "look around", "b " * 60]


def converse(engine, renderer, names, rounds=4, sampling=SAMPLED, batched=True):
    """Several conversations, a few turns each: their turns. The first one drops out after two rounds."""
    turns = {name: [] for name in names}
    for k in range(rounds):
        going = [name for i, name in enumerate(names) if k < 2 or i]
        asked = [
            prompt(name, turns[name], OPENINGS[(names.index(name) + k) % 4], seed=31 * k + len(name) + i)
            for i, name in enumerate(names)
            if name in going
        ]
        if batched:
            answers = engine.generate(asked, sampling)
        else:
            answers = [engine.generate([one], sampling)[0] for one in asked]
        for name, one, answer in zip(going, asked, answers, strict=True):
            turns[name].append(Turn(one.observation, answer))
    return turns


NAMES = ["a", "b", "c", "d"]


def ids_of(turns):
    return {name: [turn.action.token_ids for turn in played] for name, played in turns.items()}


def logprobs_of(turns):
    return torch.tensor([x for played in turns.values() for turn in played for x in turn.action.logprobs])


@pytest.mark.parametrize("sampling", [SAMPLED, Sampling(max_new_tokens=6)], ids=["sampled", "greedy"])
def test_an_answer_does_not_depend_on_the_batch(ends_turns, renderer, sampling):
    """Four conversations of different length, over several turns whose answers end at different times.

    The same ids; log-probabilities to 1e-4, since float32 sums in another order.
    """
    together = converse(LocalEngine(ends_turns, renderer), renderer, NAMES, sampling=sampling)
    alone = converse(LocalEngine(ends_turns, renderer), renderer, NAMES, sampling=sampling, batched=False)

    assert ids_of(together) == ids_of(alone)
    assert_close(logprobs_of(together), logprobs_of(alone), atol=1e-4, rtol=0)


def test_the_answers_above_end_at_different_times(ends_turns, renderer):
    """Otherwise the test above would say little: some end themselves, some are cut, lengths differ."""
    turns = converse(LocalEngine(ends_turns, renderer), renderer, NAMES)
    actions = [turn.action for played in turns.values() for turn in played]

    assert len({len(action.token_ids) for action in actions}) >= 4
    assert {action.ended for action in actions} == {True, False}


def test_nothing_kept_between_turns_gives_the_same_answers(ends_turns, renderer):
    """With no memory for keys and values all is computed again."""
    kept = converse(LocalEngine(ends_turns, renderer), renderer, NAMES)
    again = converse(LocalEngine(ends_turns, renderer, cache_gigabytes=0), renderer, NAMES)

    assert ids_of(kept) == ids_of(again)
    assert_close(logprobs_of(kept), logprobs_of(again), atol=1e-4, rtol=0)


def later_turn(engine, model, renderer, forget):
    """Lengths of the first prompt, its answer and the second prompt; what the model was fed for the second."""
    one = prompt("a", heard=OPENINGS[1])
    first = engine.generate([one], SAMPLED)[0]
    two = prompt("a", [Turn(one.observation, first)], "go", seed=2)
    if forget:
        engine.forget("a")
    with fed(model) as seen:
        engine.generate([two], SAMPLED)
    return [len(renderer.prompt_ids(one)), len(first.token_ids), len(renderer.prompt_ids(two)), seen]


def test_a_later_turn_computes_its_new_tokens_alone(ends_turns, renderer):
    """The second prompt is fed from the last sampled token on, which no pass has read yet."""
    engine = LocalEngine(ends_turns, renderer, speculate=False)
    one, answer, two, seen = later_turn(engine, ends_turns, renderer, forget=False)

    assert seen[0] == two - one - answer + 1
    assert set(seen[1:]) == {1}


def test_a_forgotten_conversation_is_computed_from_its_beginning(ends_turns, renderer):
    """Its keys and values are gone."""
    engine = LocalEngine(ends_turns, renderer, speculate=False)
    _, _, two, seen = later_turn(engine, ends_turns, renderer, forget=True)

    assert seen[0] == two


def test_of_an_action_that_was_not_taken_the_history_before_stays(ends_turns, renderer):
    """The second prompt goes on with another answer to the first: all is fed from where the two differ."""
    engine = LocalEngine(ends_turns, renderer, speculate=False)
    one = prompt("a", heard=OPENINGS[1])
    answers = {seed: engine.generate([replace(one, seed=seed)], SAMPLED)[0] for seed in range(20)}
    last = max(answers, key=lambda seed: len(answers[seed].token_ids))
    kept = answers[last]
    other = next(each for each in answers.values() if each.token_ids[0] != kept.token_ids[0])
    assert len(kept.token_ids) > 2
    engine.forget("a")
    engine.generate([replace(one, seed=last)], SAMPLED)
    two = prompt("a", [Turn(one.observation, other)], "go", seed=3)

    with fed(ends_turns) as seen:
        answer = engine.generate([two], SAMPLED)[0]

    assert seen[0] == len(renderer.prompt_ids(two)) - len(renderer.prompt_ids(one))
    fresh = LocalEngine(ends_turns, renderer).generate([two], SAMPLED)[0]
    assert answer.token_ids == fresh.token_ids
    assert answer.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)


def test_a_history_that_changed_is_computed_again(ends_turns, renderer):
    """What is kept under a name is used only if the prompt goes on from it."""
    engine = LocalEngine(ends_turns, renderer)
    engine.generate([prompt("a", heard=OPENINGS[1])], SAMPLED)
    other = prompt("a", heard=OPENINGS[3], seed=4)

    found = engine.generate([other], SAMPLED)[0]
    fresh = LocalEngine(ends_turns, renderer).generate([other], SAMPLED)[0]

    assert found.token_ids == fresh.token_ids


def test_greedy_answers_equal_transformers_generate(ends_turns, renderer):
    """An independent decoder, one conversation at a time and without our cache."""
    asked = [prompt(name, heard=heard) for name, heard in zip(NAMES, OPENINGS, strict=True)]
    answers = LocalEngine(ends_turns, renderer).generate(asked, Sampling(max_new_tokens=8))

    for one, answer in zip(asked, answers, strict=True):
        ids = torch.tensor([renderer.prompt_ids(one)])
        theirs = ends_turns.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=8,
            eos_token_id=renderer.end_id,
            pad_token_id=renderer.end_id,
        )
        assert list(answer.token_ids) == theirs[0, ids.shape[1] :].tolist()


def test_logprobs_are_of_temperature_one_and_greedy_takes_the_likeliest(tiny_model, renderer):
    """Recorded is the policy's own log-probability, whatever the decoding."""
    one = prompt("a")
    answer = LocalEngine(tiny_model, renderer).generate([one], Sampling(max_new_tokens=1))[0]
    cold = LocalEngine(tiny_model, renderer).generate(
        [one], Sampling(temperature=0.3, top_p=0.5, max_new_tokens=1)
    )[0]
    with torch.no_grad():
        exact = tiny_model(torch.tensor([renderer.prompt_ids(one)])).logits[0, -1].log_softmax(-1)

    assert answer.token_ids == (int(exact.argmax()),)
    assert_close(torch.tensor(answer.logprobs[0]), exact.max(), atol=1e-4, rtol=0)
    assert_close(torch.tensor(cold.logprobs[0]), exact[cold.token_ids[0]], atol=1e-4, rtol=0)


def test_a_conversation_that_fills_the_context_is_a_failure_of_its_own(ends_turns, renderer):
    """The others are answered as if it were not there."""
    engine = LocalEngine(ends_turns, renderer, context=60)
    asked = [prompt("a"), prompt("b", heard=OPENINGS[3]), prompt("c")]
    found = engine.generate(asked, SAMPLED)

    assert isinstance(found[1], ContextFull)
    assert "no room for an answer" in str(found[1])
    assert found[0].token_ids == LocalEngine(ends_turns, renderer).generate([asked[0]], SAMPLED)[0].token_ids
    assert isinstance(found[2], Action)


def test_an_answer_stops_at_the_context(tiny_model, renderer):
    """Three tokens of room are three tokens of answer, which then counts as cut."""
    one = prompt("a")
    room = len(renderer.prompt_ids(one)) + 3
    found = LocalEngine(tiny_model, renderer, context=room).generate([one], SAMPLED)[0]

    assert len(found.token_ids) == 3
    assert not found.ended


def test_no_prompts_are_no_answers(tiny_model, renderer):
    """An empty batch calls no model."""
    assert LocalEngine(tiny_model, renderer).generate([], SAMPLED) == []


def test_prompts_join_and_leave_at_any_token(ends_turns, renderer):
    """The second joins when the first has three tokens; each gets what it gets alone, and the shorter leaves first."""
    engine = LocalEngine(ends_turns, renderer, speculate=False)
    first, second = prompt("a", heard=OPENINGS[3], seed=5), prompt("b", seed=6)
    alone = [
        LocalEngine(ends_turns, renderer).generate([one], replace(SAMPLED, max_new_tokens=limit))[0]
        for one, limit in ((first, 40), (second, 2))
    ]
    engine.submit([first], replace(SAMPLED, max_new_tokens=40))
    found = [engine.advance() for _ in range(3)]
    engine.submit([second], replace(SAMPLED, max_new_tokens=2))
    while sum(map(len, found)) < 2:
        found.append(engine.advance())

    answers = [each for part in found for each in part]
    assert len(alone[0].token_ids) > 5
    assert [asked.conversation for asked, _ in answers] == ["b", "a"]
    assert [answer.token_ids for _, answer in answers] == [alone[1].token_ids, alone[0].token_ids]


def test_a_long_prompt_is_fed_in_parts(ends_turns, renderer, monkeypatch):
    """Seven tokens a pass at most; the answers are those of one pass."""
    asked = [prompt(name, heard=heard) for name, heard in zip(NAMES, OPENINGS, strict=True)]
    whole = LocalEngine(ends_turns, renderer).generate(asked, SAMPLED)
    monkeypatch.setattr("perturn.engines.local.engine._PASS", 7)
    engine = LocalEngine(ends_turns, renderer, speculate=False)
    with fed(ends_turns) as seen:
        parts = engine.generate(asked, SAMPLED)

    assert max(seen) == 7
    assert [one.token_ids for one in parts] == [one.token_ids for one in whole]


def budget_for(model, renderer, tokens):
    """Gigabytes in which so many tokens have room."""
    return tokens * LocalEngine(model, renderer)._token_bytes / 1e9


def test_conversations_of_one_size_attend_in_one_call(ends_turns, renderer, monkeypatch):
    """Each prompt is read alone; after that a pass is one call a layer, for four conversations as for one."""
    attend, rows = F.scaled_dot_product_attention, []
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda query, *a, **k: rows.append(query.shape[0]) or attend(query, *a, **k),
    )
    engine = LocalEngine(ends_turns, renderer, speculate=False)
    layers = ends_turns.config.num_hidden_layers
    engine.submit([prompt(name, seed=n) for n, name in enumerate(NAMES)], SAMPLED)
    answered = len(engine.advance())
    rows.clear()
    engine.advance()

    assert len(rows) == layers
    assert 2 <= 4 - answered <= rows[0] <= 4, "those in between that have ended are asked with them"


def test_prompts_wait_rather_than_exceed_the_budget(ends_turns, renderer):
    """Room for one of the long prompts and its answer at a time: none fails, and memory stays within the budget.

    Buffers are multiples of 64 tokens, hence the slack of one multiple.
    """
    asked = [prompt(name, heard=OPENINGS[3], seed=n) for n, name in enumerate(NAMES)]
    longest = len(renderer.prompt_ids(asked[0])) + SAMPLED.max_new_tokens
    free = LocalEngine(ends_turns, renderer).generate(asked, SAMPLED)
    engine = LocalEngine(ends_turns, renderer, cache_gigabytes=budget_for(ends_turns, renderer, longest + 64))
    engine.submit(asked, SAMPLED)
    answers, most = {}, 0
    while len(answers) < len(asked):
        answers |= {one.conversation: answer for one, answer in engine.advance()}
        histories = [row.history for row in engine._running] + list(engine._kept.values())
        most = max(most, sum(history.nbytes for history in histories))

    assert [answers[name].token_ids for name in NAMES] == [one.token_ids for one in free]
    assert 0 < most <= engine._budget


def test_the_conversation_that_rested_longest_is_evicted_first(ends_turns, renderer):
    """Room for two conversations of three: the first is computed again, the third is not."""
    engine = LocalEngine(ends_turns, renderer)
    asked = [prompt(name, heard=f"{name} " * 60, seed=n) for n, name in enumerate("abc")]
    length = len(renderer.prompt_ids(asked[0]))
    engine._budget = int(1e9 * budget_for(ends_turns, renderer, 2 * (-(-(length + 7) // 64) * 64)))
    turns = [Turn(one.observation, engine.generate([one], SAMPLED)[0]) for one in asked]
    fresh = []
    for name, turn in (("c", turns[2]), ("a", turns[0])):
        with fed(ends_turns) as seen:
            engine.generate([prompt(name, [turn])], SAMPLED)
        fresh.append(seen[0])

    assert fresh[0] < 64 < length < fresh[1]


def test_training_sees_the_tokens_and_logprobs_that_were_sampled(ends_turns, renderer, own_environment):
    """Token in, token out, on episodes really played.

    The random policy writes tokens whose text tokenizes to others, and invalid turns; float32 to 1e-4.
    """
    env = own_environment.GuessNumber()
    protocol = EpisodeProtocol(name="plain", format="action", max_turns=3)
    found = list(
        play(
            [Job(task, seed) for seed, task in enumerate(env.tasks("train")[:3])],
            LocalEngine(ends_turns, renderer),
            own_environment.GuessNumber,
            protocol=protocol,
            sampling=SAMPLED,
            concurrency=2,
        )
    )

    assert sum(len(one.turns) for one in found) == 9
    for one in found:
        encoded = renderer.encode(one)
        own = [token for token, t in zip(encoded.ids, encoded.turn, strict=True) if t != NO_TURN]
        sampled = [token for turn in one.turns for token in turn.action.token_ids]
        recorded = torch.tensor([x for turn in one.turns for x in turn.action.logprobs])
        with torch.no_grad():
            computed = action_logprobs(ends_turns, lay_out([encoded]))

        assert own == sampled
        assert_close(recorded, computed, atol=1e-4, rtol=0)


def test_weights_are_updated_while_it_runs(ends_turns, renderer, tmp_path):
    """Answers and name are those of the new weights; what was kept of a conversation is not used for its next turn."""
    other = copy.deepcopy(ends_turns)
    engine = LocalEngine(ends_turns, renderer, name="old")
    first = engine.generate([prompt("a", heard=OPENINGS[1])], SAMPLED)[0]
    with torch.no_grad():
        other.model.norm.weight.mul_(2.0)
    other.lm_head.bias, ends_turns.lm_head.bias = None, None  # no checkpoint of a Llama has one
    other.save_pretrained(tmp_path)
    later = [prompt("a", [Turn(prompt("a", heard=OPENINGS[1]).observation, first)], seed=1)]
    engine.update_weights(tmp_path, "new")

    assert engine.generate(later, SAMPLED) == LocalEngine(other, renderer).generate(later, SAMPLED)
    assert engine.name == "new"


def test_weights_are_not_updated_under_prompts(tiny_model, renderer):
    """Half an answer would be of either policy."""
    engine = LocalEngine(tiny_model, renderer)
    engine.submit([prompt("a")], SAMPLED)

    with pytest.raises(RunError, match="1 prompts are being answered"):
        engine.update_weights("x", "y")


def test_packed_weights_give_the_same_answers_and_are_given_back(ends_turns, renderer):
    """All linear layers of the model, until the engine is closed; float32 sums in another order."""
    linear = [module for module in ends_turns.modules() if type(module) is torch.nn.Linear]
    plain = converse(LocalEngine(ends_turns, renderer, pack=False), renderer, NAMES)
    engine = LocalEngine(ends_turns, renderer)
    assert all("forward" in module.__dict__ for module in linear)
    packed = converse(engine, renderer, NAMES)
    engine.close()

    assert ids_of(packed) == ids_of(plain)
    assert_close(logprobs_of(packed), logprobs_of(plain), atol=1e-4, rtol=0)
    assert not any("forward" in module.__dict__ for module in linear)
