"""Weights that are replaced in the middle of answers: which tokens are of which version, and what they are worth."""

import copy
import threading

import pytest
import torch
from torch.testing import assert_close

from perturn.chat.tokens import NO_TURN
from perturn.engines.local.engine import LocalEngine
from perturn.engines.protocol import SwappingEngine
from perturn.engines.shared_engine import Ended, SharedEngine
from perturn.episodes.engine_abilities import EngineAbilities
from perturn.errors import DataError, EngineFailure
from perturn.policy.logprobs import action_logprobs
from perturn.policy.packing import lay_out
from perturn.types import Action, Prompt, Sampling, Task, Trajectory, Turn

SYSTEM = ({"role": "system", "content": "Play."},)
SAMPLED = Sampling(temperature=1.0, max_new_tokens=24)
LONG = "an observation of many words, which all of these conversations have in common, and then their own: "


@pytest.fixture
def versions(tiny_model, tmp_path):
    """Three policies, a folder each, that differ by much in all of their weights."""
    found = []
    for number in range(3):
        model = copy.deepcopy(tiny_model)
        torch.manual_seed(number)
        with torch.no_grad():
            for weight in model.parameters() if number else ():
                weight += 0.1 * torch.randn_like(weight)
        model.save_pretrained(tmp_path / str(number))
        found.append((model, tmp_path / str(number)))
    return found


def asked(name, turns=(), seed=0):
    heard = ({"role": "user", "content": f"{LONG}{name}"},)
    return Prompt(SYSTEM, tuple(turns), heard, seed, f"{name}#0")


def moved(engine, passes):
    """What is answered in so many passes."""
    return [each for _ in range(passes) for each in engine.advance()]


def two_swaps(engine, versions, names="abc"):
    """Answers to two turns of some conversations, with a swap within each turn: the turns by conversation."""
    turns = {f"{name}#0": [] for name in names}
    engine.version = 0
    for number in (1, 2):
        prompts = [asked(name, turns[f"{name}#0"], 7 * number + i) for i, name in enumerate(names)]
        engine.submit(prompts, SAMPLED)
        answers = moved(engine, 5)
        engine.swap_weights(versions[number][1], f"new-{number}", number)
        while len(answers) < len(prompts):
            answers += engine.advance()
        for one, answer in answers:
            turns[one.conversation].append(Turn(one.observation, answer))
    return turns


@pytest.mark.parametrize("cache_gigabytes", [2.0, 0.0])
def test_each_token_has_its_logprob_under_its_own_version(versions, renderer, cache_gigabytes):
    """Within 1e-3 nats, whether keys and values are kept or not; and by another version it would not."""
    engine = LocalEngine(
        copy.deepcopy(versions[0][0]), renderer, cache_gigabytes=cache_gigabytes, speculate=False
    )
    turns = two_swaps(engine, versions)

    seen = set()
    for name, played in turns.items():
        one = Trajectory(Task(name), tuple(played), prompt=SYSTEM)
        encoded = renderer.encode(one)
        with torch.no_grad():
            scored = torch.stack([action_logprobs(model, lay_out([encoded])) for model, _ in versions])
        version = torch.tensor([each for turn in played for each in turn.action.versions])
        recorded = torch.tensor([each for turn in played for each in turn.action.logprobs])
        assert sum(turn != NO_TURN for turn in encoded.turn) == len(version)
        assert_close(recorded, scored.gather(0, version[None])[0], atol=1e-3, rtol=0)
        assert float((recorded - scored[0])[version > 0].abs().max()) > 1e-2
        assert version.tolist() == sorted(version.tolist())
        seen.update(version.tolist())
    assert seen == {0, 1, 2}


def test_a_turn_that_waits_does_not_keep_what_older_weights_computed(versions, renderer):
    """It holds the keys and values of its conversation, and waits for memory while the weights are replaced."""
    model = copy.deepcopy(versions[0][0])
    room = 320 * LocalEngine(copy.deepcopy(model), renderer)._token_bytes / 1e9
    engine = LocalEngine(model, renderer, cache_gigabytes=room, speculate=False)
    engine.version = 0
    (first,) = engine.generate([asked("a", seed=1)], SAMPLED)
    engine.submit([asked("b", seed=2)], Sampling(temperature=1.0, max_new_tokens=60))
    engine.advance()
    turns = [Turn(asked("a").observation, first)]
    engine.submit([asked("a", turns, 3)], Sampling(temperature=1.0, max_new_tokens=60))
    engine.advance()
    assert [bool(row.history.ids) for row in engine._waiting] == [True]

    engine.swap_weights(versions[1][1], "new", 1)
    answers = {}
    while len(answers) < 2:
        answers |= {one.conversation: answer for one, answer in engine.advance()}

    action = answers["a#0"]
    encoded = renderer.encode(
        Trajectory(Task("a"), (*turns, Turn(asked("a").observation, action)), prompt=SYSTEM)
    )
    with torch.no_grad():
        scored = action_logprobs(versions[1][0], lay_out([encoded]))
    assert set(action.versions) == {1}
    assert_close(torch.tensor(action.logprobs), scored[-len(action.logprobs) :], atol=1e-3, rtol=0)


def test_without_a_version_nothing_is_said(tiny_model, renderer):
    """As before: the field is empty and is not written."""
    engine = LocalEngine(tiny_model, renderer)

    assert isinstance(engine, SwappingEngine)
    assert engine.generate([asked("a")], SAMPLED)[0].versions == ()


def test_versions_are_as_many_as_tokens():
    with pytest.raises(DataError, match="versions must be empty or one for each of 2 token_ids, got 1"):
        Action("", (1, 2), (-1.0, -1.0), versions=(0,))


class Slow:
    """A streaming engine that answers the oldest prompt in each pass, when it is let."""

    def __init__(self):
        self.name, self.version, self.open, self.forgotten = "old", 0, [], []
        self.go, self.swaps, self.fails = threading.Semaphore(0), [], None

    def submit(self, prompts, sampling):
        """Take them on; no conversation twice at a time."""
        assert not {one.conversation for one in self.open} & {one.conversation for one in prompts}
        self.open += prompts

    def advance(self):
        """Answer the oldest."""
        self.go.acquire()
        if self.fails:
            raise self.fails
        one = self.open.pop(0)
        return [(one, Action(f"{one.conversation} of {self.name}"))]

    def swap_weights(self, folder, name, version):
        """Remember what was open."""
        self.swaps.append((folder, len(self.open)))
        self.name, self.version = name, version

    def update_weights(self, folder, name):
        """Not asked."""
        raise NotImplementedError

    def generate(self, prompts, sampling):
        """Not asked."""
        raise NotImplementedError

    def cancel(self, conversation):
        """Drop it."""
        self.open = [one for one in self.open if one.conversation != conversation]

    def forget(self, conversation):
        """Remember it."""
        self.forgotten.append(conversation)

    def close(self):
        """Hold nothing."""


@pytest.fixture
def slow():
    """The engine, and the engine shared."""
    engine = Slow()
    shared = SharedEngine(engine)
    yield engine, shared
    engine.go.release(99)
    shared.close()


def answers_of(port, count):
    found = []
    while len(found) < count:
        found += port.advance()
    return found


def test_ports_ask_of_one_conversation_at_the_same_time(slow):
    """One task and sample in two iterations; each play gets its own prompt back, and its own answer."""
    engine, shared = slow
    ports = [shared.port(), shared.port()]
    prompts = [asked("a"), asked("a", seed=1)]
    for port, prompt in zip(ports, prompts, strict=True):
        port.submit([prompt], SAMPLED)
    engine.go.release(2)

    for number, (port, prompt) in enumerate(zip(ports, prompts, strict=True)):
        ((back, answer),) = answers_of(port, 1)
        assert back is prompt
        assert answer.text == f"{number}/a#0 of old"


def test_a_port_tells_the_tokens_of_its_own_conversations(slow):
    """By their own names, though another port has a conversation of the same name."""
    engine, shared = slow
    engine.abilities = EngineAbilities(prompt_tokens={"0/a#0": 3, "1/a#0": 5, "1/b#0": 7})
    ports = [shared.port(), shared.port()]

    assert [dict(port.abilities.prompt_tokens) for port in ports] == [{"a#0": 3}, {"a#0": 5, "b#0": 7}]
    assert len(ports[1].abilities.prompt_tokens) == 2


def test_a_swap_falls_between_two_passes(slow):
    """Prompts stay open, and the next answer is of the new weights; a port keeps its name."""
    engine, shared = slow
    port, before = shared.port(), engine.name
    port.submit([asked("a")], SAMPLED)
    port.submit([asked("b")], SAMPLED)
    engine.go.release(1)
    answers_of(port, 1)
    swap = threading.Thread(target=shared.swap, args=("folder", "new", 1))
    swap.start()
    engine.go.release(1)
    swap.join()
    engine.go.release(1)

    assert [folder for folder, _ in engine.swaps] == ["folder"]
    assert (port.name, shared.port().name, engine.version) == (before, "new", 1)


def test_what_the_engine_raises_is_raised_in_each_play(slow):
    """A failure of one prompt is an answer; what breaks the engine is not."""
    engine, shared = slow
    port = shared.port()
    engine.fails = RuntimeError("broken")
    port.submit([asked("a")], SAMPLED)
    engine.go.release(1)
    with pytest.raises(RuntimeError, match="broken"):
        answers_of(port, 1)
    engine.fails = EngineFailure("this one")
    port.submit([asked("b")], SAMPLED)
    engine.go.release(1)

    assert isinstance(answers_of(port, 1)[0][1], EngineFailure)


def test_plays_end_when_the_engine_is_closed():
    """Whether they ask or wait."""
    shared = SharedEngine(Slow())
    port = shared.port()
    shared.close()

    for act in (port.advance, lambda: port.submit([asked("a")], SAMPLED)):
        with pytest.raises(Ended):
            act()
