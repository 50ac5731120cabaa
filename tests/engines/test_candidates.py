"""Several candidates of each action, asked for together, and one of them the answer."""

import pytest

from episodes.counting import PROTOCOL, Counter, Script, jobs
from perturn.engines.candidates import with_candidates
from perturn.engines.engine_check import check_engine
from perturn.engines.local.engine import LocalEngine
from perturn.episodes.lockstep_blocks import play_blocks
from perturn.episodes.play_many import play
from perturn.errors import EngineFailure, WorldLost
from perturn.types import Action, Prompt, Sampling, StreamingEngine

SAMPLED = Sampling(temperature=1.0, max_new_tokens=4)


def prompt(name, seed=0):
    return Prompt((), (), ({"role": "user", "content": "go"},), seed, f"{name}#0")


def last(prompt, candidates):
    return len(candidates) - 1


def named(prompt):
    """An answer that says what was asked; as many tokens as the conversation's name is long."""
    return Action(f"{prompt.conversation} {prompt.seed}", tuple(range(1, len(prompt.conversation) + 1)))


def test_all_candidates_of_all_prompts_are_one_batch():
    """Each a conversation and a seed of its own; the answer says how many tokens each has."""
    engine = Script(named)
    asked = [prompt("a", seed=7), prompt("b", seed=7), prompt("c", seed=8)]

    answers = with_candidates(engine, 3, last).generate(asked, SAMPLED)

    (batch,) = engine.batches
    names = [f"{name}#0{end}" for name in "abc" for end in ("", "~1", "~2")]
    assert [each.conversation for each in batch] == names
    assert [one.text.split()[0] for one in answers] == ["a#0~2", "b#0~2", "c#0~2"]
    assert [one.candidates for one in answers] == [(3, 5, 5)] * 3
    seeds = [each.seed for each in batch]
    assert seeds[:3] == seeds[3:6]
    assert len({*seeds[:3], *seeds[6:]}) == 6


def test_one_candidate_is_the_plain_answer(tiny_model, renderer):
    """And the first of several is too."""
    engine = LocalEngine(tiny_model, renderer)
    asked = [prompt(name, seed) for seed, name in enumerate("abcd")]
    (plain, one, four) = (
        each.generate(asked, SAMPLED)
        for each in (
            engine,
            with_candidates(engine, 1, last),
            with_candidates(engine, 4, lambda prompt, candidates: 0),
        )
    )

    assert [each.token_ids for each in plain] == [each.token_ids for each in one]
    assert [each.token_ids for each in plain] == [each.token_ids for each in four]
    assert [len(each.candidates) for each in (plain[0], one[0], four[0])] == [0, 1, 4]


def test_candidates_do_not_depend_on_what_else_is_asked(tiny_model, renderer):
    """Alone, together and in another order: the same seeds, so the same tokens."""
    engine = with_candidates(LocalEngine(tiny_model, renderer), 3, last)
    asked = [prompt(name, seed) for seed, name in enumerate("abc")]

    together = engine.generate(asked, SAMPLED)
    alone = [engine.generate([one], SAMPLED)[0] for one in reversed(asked)][::-1]

    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert len({one.token_ids for one in together}) == 3


def test_a_streaming_engine_stays_one_and_keeps_the_contract(tiny_model, renderer):
    engine = with_candidates(LocalEngine(tiny_model, renderer), 2, last)

    assert isinstance(engine, StreamingEngine)
    assert not isinstance(with_candidates(Script(named), 2, last), StreamingEngine)
    assert check_engine(engine) == []


def test_a_candidate_that_fails_is_left_out():
    """Where all fail, the prompt fails as its first did."""

    def answer(prompt):
        lost = prompt.conversation.startswith("b") or "~" not in prompt.conversation
        return EngineFailure(prompt.conversation) if lost else named(prompt)

    left, none = with_candidates(Script(answer), 3, last).generate([prompt("a"), prompt("b")], SAMPLED)

    assert left.candidates == (5, 5)
    assert isinstance(none, EngineFailure)
    assert str(none) == "b#0"


def up_at_last(prompt):
    return Action("Action: up" if prompt.conversation.endswith("~1") else "Action: wait")


class Streams(Script):
    """Answers one prompt a moment, the newest first."""

    def submit(self, prompts, sampling):
        """Take prompts on."""
        self.batches += prompts

    def advance(self):
        """Answer the newest."""
        return [(self.batches[-1], self.answer(self.batches.pop()))]


@pytest.mark.parametrize("kind", [Script, Streams])
def test_episodes_are_played_with_what_was_chosen(kind):
    """The world is stepped once a turn; at the end every conversation is forgotten."""
    inner = kind(up_at_last)
    engine, worlds = with_candidates(inner, 2, last), []

    found = list(
        play(jobs("a", "b", "c"), engine, lambda: Counter(worlds), protocol=PROTOCOL, sampling=SAMPLED)
    )

    assert [(one.success, len(one.turns)) for one in found] == [(True, 3)] * 3
    assert {turn.action.candidates for one in found for turn in one.turns} == {(0, 0)}
    assert sorted(inner.forgotten) == [f"{name}#0{end}" for name in "abc" for end in ("", "~1")]


def test_blocks_ask_for_all_candidates_of_a_turn_at_once():
    """Also after a world was lost, whose episode is given the actions that were chosen before."""
    inner, lost = Script(up_at_last), [1]

    class Mortal(Counter):
        def step(self, action):
            if self.seed == 1 and lost and self.count == lost[-1]:
                lost.pop()
                raise WorldLost("gone")
            return super().step(action)

    engine = with_candidates(inner, 2, last)
    found = list(play_blocks([jobs("a", "b")], engine, Mortal, protocol=PROTOCOL, sampling=SAMPLED))

    assert lost == []
    assert [len(batch) for batch in inner.batches] == [4, 4, 4]
    assert [one.success for one in found] == [True, True]
