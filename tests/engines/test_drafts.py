"""Guesses of the next tokens, and that answers are those without them."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from perturn.engines.local import draft_tokens as _drafts
from perturn.engines.local.draft_tokens import Drafts, Followers, Pace
from perturn.engines.local.engine import LocalEngine
from perturn.engines.local.settings import LocalSettings
from perturn.engines.protocol import Loaded, Serving
from perturn.types import Prompt, Sampling, Turn
from support.crossed import crossed

from .playing import Numbers, fed

(END,) = Numbers.end_ids
GREEDY, SAMPLED = Sampling(max_new_tokens=24), Sampling(temperature=1.0, max_new_tokens=24)


def test_the_last_follower_is_guessed_as_surely_as_it_was_right():
    """After 1: 2, 2, 3, 3. Equal to the one before, or the first: 2, 2, 3, so 3 / 4.5; the guess is 3."""
    seen = Followers()
    seen.learn([1, 2, 1, 2, 1, 3, 1, 3], 0)

    assert seen.guess([9, 1]) == (pytest.approx(3 / 4.5), 3)
    assert seen.guess([9]) is None


def test_the_longest_tokens_that_are_known_decide():
    """After 1 stood 5 at last; after 7 8 1 stood 4."""
    seen = Followers()
    seen.learn([7, 8, 1, 4, 2, 2, 1, 5], 0)

    assert seen.guess([7, 8, 1])[1] == 4
    assert seen.guess([0, 0, 1])[1] == 5


def test_a_name_is_copied_from_what_the_conversation_read():
    """`40 41 42` stands in the observation; after 40, 41 and 42 are likely, in this conversation alone."""
    drafts = Drafts({END})
    drafts.read("a", [1, 40, 41, 42, 2, 40, 41, 42, 3])

    assert drafts.guess("a", [9, 40], 2, 0.1) == [41, 42]
    assert drafts.guess("b", [9, 40], 2, 0.1) == []
    drafts.forget("a")
    assert drafts.guess("a", [9, 40], 2, 0.1) == []


def test_an_answer_is_guessed_in_all_conversations_up_to_its_end():
    """By what stood before it; nothing is guessed behind the end, or beyond the most that is asked."""
    drafts = Drafts({END})
    for _ in range(3):
        drafts.learn([1, 2, 3], [10, 11, END])
    drafts.read("a", [END, 60, END, 60])

    assert drafts.guess("a", [5, 2, 3], 9, 0.1) == [10, 11, END]
    assert drafts.guess("a", [5, 2, 3], 2, 0.1) == [10, 11]


def test_guessing_stops_where_the_chance_is_too_small():
    """Each is right with 1 / 1.5: after two, 0.44; after three, 0.30."""
    drafts = Drafts({END})
    drafts.learn([1], [2, 3, 4, 5])

    assert drafts.guess("a", [1], 9, 0.4) == [2, 3]


def test_what_is_kept_is_bounded(monkeypatch):
    """Ten contexts of actions, and two conversations; the oldest go."""
    monkeypatch.setattr(_drafts, "_ACTIONS", 10)
    monkeypatch.setattr(_drafts, "_CONVERSATIONS", 2)
    drafts = Drafts({END})
    for name in "abc":
        drafts.read(name, [1, 2])
    drafts.learn([], [*range(50)])

    assert list(drafts._own) == ["b", "c"]
    assert len(drafts._actions) == 10
    assert drafts.guess("x", [48], 1, 0.1) == [49]
    assert drafts.guess("x", [20], 1, 0.1) == []


def test_of_a_conversation_that_was_dropped_the_end_is_learned_again(monkeypatch):
    """So a turn costs a bounded time, however many conversations take turns."""
    monkeypatch.setattr(_drafts, "_CONVERSATIONS", 1)
    monkeypatch.setattr(_drafts, "_READ", 10)
    drafts = Drafts({END})
    for name in "ab":
        drafts.read(name, range(100))

    assert drafts.guess("b", [98], 1, 0.1) == [99]
    assert drafts.guess("b", [50], 1, 0.1) == []


def test_the_line_through_passes():
    """0.1 s and 0.01 s a token: a pass costs as much as ten tokens besides its own. Unknown at first."""
    pace = Pace()
    pace.add(5, 0.15)
    assert pace.free == _drafts._FREE
    for tokens in (10, 20, 40):
        pace.add(tokens, 0.1 + 0.01 * tokens)

    assert pace.free == pytest.approx(10)


def make_model(kind="llama", **changes):
    """A tiny model of random weights that repeats itself, and others, but not always."""
    config = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config | changes)).eval()
    model.lm_head.weight.data *= 0.6 / model.lm_head.weight.std()
    return model


def converse(model, sampling, speculate):
    """Four conversations of four turns; their actions and log-probabilities, and the tokens of each pass."""
    engine, turns = LocalEngine(model, Numbers(), speculate=speculate), [[] for _ in range(4)]
    with fed(model) as seen:
        for k in range(4):
            heard = [
                ({"role": "user", "content": " ".join(["7 8 9"] * (1 + (n + k) % 3))},) for n in range(4)
            ]
            asked = [Prompt((), tuple(turns[n]), heard[n], k * 7 + n % 2, str(n)) for n in range(4)]
            for n, answer in enumerate(engine.generate(asked, replace(sampling, max_new_tokens=24 - k))):
                turns[n].append(Turn(heard[n], answer))
    engine.close()
    actions = [turn.action for played in turns for turn in played]
    return (
        [one.token_ids for one in actions],
        torch.tensor([x for one in actions for x in one.logprobs]),
        seen,
    )


@pytest.fixture
def cheap(monkeypatch):
    """Tokens cost little, whatever else this machine does."""
    monkeypatch.setattr(Pace, "free", 64.0)


MODELS = {"llama": {}, "qwen2": {"num_key_value_heads": 4}, "mistral": {"sliding_window": 8}}


@pytest.mark.parametrize(
    ("sampling", "kind"), crossed([GREEDY, SAMPLED, replace(SAMPLED, top_p=0.9)], list(MODELS))
)
def test_answers_are_those_without_guesses(kind, sampling, cheap):
    """Token by token, with the same random numbers, so in distribution too; float32 sums in another order.

    Some guesses are right, since there are fewer passes, and some wrong, since more is fed than was said.
    """
    model = make_model(kind, **MODELS[kind])
    plain, likely, slow = converse(model, sampling, speculate=False)
    ids, logprobs, fast = converse(model, sampling, speculate=True)

    assert ids == plain
    assert_close(logprobs, likely, atol=1e-4, rtol=0)
    assert len(fast) < len(slow)
    assert sum(fast) > sum(slow)


def test_an_answer_that_is_guessed_ends_at_its_limit(cheap):
    """The same again: of its 5 tokens 4 are fed, at once with the prompt, and the last is said but not fed."""
    model = make_model()
    engine = LocalEngine(model, Numbers())
    asked = [Prompt((), (), ({"role": "user", "content": "7 8 9"},), 0, name) for name in "ab"]
    first = engine.generate(asked[:1], Sampling(max_new_tokens=20))[0]
    with fed(model) as seen:
        again = engine.generate(asked[1:], Sampling(max_new_tokens=5))[0]

    assert len(first.token_ids) == 20
    assert again.token_ids == first.token_ids[:5]
    assert seen == [3 + 5 - 1]
    assert len(engine._kept["b"].ids) == 3 + 5 - 1


@pytest.mark.parametrize(("speculate", "deterministic"), [(True, False), (True, True), (False, False)])
def test_a_deterministic_run_does_without(speculate, deterministic):
    """What was answered before would change the last bits of an answer."""
    loaded = Loaded(make_model(), Numbers(), "policy", "cpu", "float32", None)
    engine = LocalSettings(speculate=speculate).open(
        Serving("policy", "", (), lambda: loaded, deterministic=deterministic)
    )

    assert (engine._drafts is not None) == (speculate and not deterministic)
