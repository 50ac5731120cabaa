"""An engine that allows concurrent calls: no episode waits for another, and nothing is left when a play ends."""

import threading
import time

import pytest

from episodes.counting import PROTOCOL, Counter, jobs, up
from perturn.episodes.engine_abilities import EngineAbilities
from perturn.episodes.play_many import play
from perturn.errors import RunError
from perturn.types import Sampling


class Concurrent:
    """Answers `up`; prompts of the task `slow` wait for `may_go`, and the first prompt of the task `bad` raises."""

    name = "concurrent"
    abilities = EngineAbilities(concurrent_calls=8)

    def __init__(self):
        self.seeds, self.answered, self.may_go, self.has_slow = {}, [], threading.Event(), threading.Event()

    def generate(self, prompts, sampling):
        """Answer one prompt."""
        (prompt,) = prompts
        task = prompt.conversation.partition("#")[0]
        self.seeds[task, len(prompt.turns)] = prompt.seed
        if task == "slow":
            self.has_slow.set()
            assert self.may_go.wait(30)
        if task == "bad":
            assert self.has_slow.wait(30)
            threading.Timer(0.2, self.may_go.set).start()
            raise RunError("the budget is spent")
        self.answered.append(task)
        return [up(prompt)]

    def forget(self, conversation):
        """Do nothing."""

    def close(self):
        """Do nothing."""


def start(engine, *names):
    return play(jobs(*names), engine, Counter, protocol=PROTOCOL, sampling=Sampling(), concurrency=len(names))


def test_no_episode_waits_for_a_slow_answer_to_another():
    """The fast episodes end while the slow one waits for its first answer. Seeds are the same as with batches."""
    engine = Concurrent()
    playing = start(engine, "slow", "a", "b")

    first = {next(playing).task.id for _ in range(2)}
    slow_answers = engine.answered.count("slow")
    engine.may_go.set()
    (last,) = playing

    assert (first, slow_answers) == ({"a", "b"}, 0)
    assert (last.task.id, last.success) == ("slow", True)
    assert engine.seeds == {
        (name, turn): 1_000_003 * seed + turn
        for seed, name in enumerate(["slow", "a", "b"])
        for turn in range(3)
    }


def test_a_call_that_raises_ends_the_play_after_the_open_calls():
    """Their answers are paid for; none is asked for after the error."""
    engine = Concurrent()

    with pytest.raises(RunError, match="the budget is spent"):
        list(start(engine, "slow", "bad"))
    assert engine.answered == ["slow"]


def test_a_play_that_is_given_up_leaves_no_thread(monkeypatch):
    """Its open call may take a moment; after that it is abandoned."""
    monkeypatch.setattr("perturn.episodes.play_many._LAST_S", 0.1)
    engine, before = Concurrent(), set(threading.enumerate())
    playing = start(engine, "slow", "a")
    next(playing)
    playing.close()
    engine.may_go.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)

    assert set(threading.enumerate()) <= before
    assert engine.answered.count("a") == 3


def test_an_answer_that_is_no_action_ends_the_play():
    """As with other engines."""
    engine = Concurrent()
    engine.generate = lambda prompts, sampling: ["up"]

    with pytest.raises(Exception, match="each answer of engine 'concurrent' must be"):
        list(start(engine, "a"))


class TwoCalls(Concurrent):
    """Two calls at a time, each of 0.1 seconds; the error `fault` ends all of them."""

    abilities = EngineAbilities(concurrent_calls=2)
    fault = None

    def generate(self, prompts, sampling):
        """Answer one prompt."""
        self.answered += prompts
        time.sleep(0.1)
        if self.fault:
            raise self.fault
        return [up(prompts[0])]


def test_after_an_error_no_waiting_prompt_is_sent():
    """Twelve episodes wait for two slots."""
    engine = TwoCalls()
    engine.fault = RunError("the key is wrong")

    with pytest.raises(RunError, match="the key is wrong"):
        list(start(engine, *"abcdefghijkl"))
    assert len(engine.answered) <= 3


def test_an_interrupted_play_sends_no_waiting_prompt():
    """Twelve episodes wait for two slots; the consumer fails after the first."""
    engine = TwoCalls()
    playing = start(engine, *"abcdefghijkl")
    next(playing)
    playing.close()
    sent = len(engine.answered)
    time.sleep(0.5)

    assert len(engine.answered) == sent < 36
