"""An engine's thread outlives what a user's engine raises or leaves out."""

import threading
import time

from perturn.engines.engine_thread import EngineThread
from perturn.episodes.engine_abilities import EngineAbilities
from perturn.types import Action, Prompt, Sampling


class Careless:
    """Answers no prompt the first time, and fails to forget."""

    name = "careless"

    def __init__(self):
        self.calls = 0

    def generate(self, prompts, sampling):
        """Answer all prompts of the second call."""
        self.calls += 1
        return [] if self.calls == 1 else [Action("a")] * len(prompts)

    def forget(self, conversation):
        """Fail."""
        raise RuntimeError("nothing to forget")


def test_missing_answers_and_a_failing_forget_end_no_thread(caplog):
    answered, there = [], threading.Semaphore(0)

    def deliver(answers):
        answered.extend(answers)
        there.release()

    thread = EngineThread(Careless(), deliver)
    for name in "ab":
        thread.submit(Prompt((), (), ({"role": "user", "content": "go"},), 0, name), Sampling())
        assert there.acquire(timeout=30)
        thread.forget(name)
    thread.close()

    (_, missing), (_, good) = answered
    assert isinstance(missing, ValueError)
    assert good == Action("a")
    assert caplog.text.count("the engine failed to release conversation") == 2


class Bare:
    """Answers, and has no other method."""

    name = "bare"

    def generate(self, prompts, sampling):
        """Answer all prompts."""
        return [Action("a")] * len(prompts)


def test_an_engine_without_forget_ends_no_thread(caplog):
    answered = []
    there = threading.Semaphore(0)
    thread = EngineThread(Bare(), lambda answers: (answered.extend(answers), there.release()))
    for name in "ab":
        thread.submit(Prompt((), (), ({"role": "user", "content": "go"},), 0, name), Sampling())
        assert there.acquire(timeout=30)
        thread.forget(name)
    thread.close()

    assert [answer for _, answer in answered] == [Action("a")] * 2
    assert caplog.text.count("the engine failed to release conversation") == 2


class Held:
    """Answers concurrent calls, each only after it is released."""

    name = "held"
    abilities = EngineAbilities(concurrent_calls=8)

    def __init__(self):
        self.asked, self.answered, self.released = [], [], threading.Event()

    def generate(self, prompts, sampling):
        """Note the conversations, and wait."""
        self.asked += [prompt.conversation for prompt in prompts]
        assert self.released.wait(30)
        self.answered += prompts
        return [Action("a")] * len(prompts)

    def forget(self, conversation):
        """Do nothing."""

    def close(self):
        """Do nothing."""


def test_a_cancelled_prompt_whose_call_has_not_begun_is_not_sent(monkeypatch):
    """One call at a time: `b` waits for `a`, and is cancelled."""
    monkeypatch.setattr(Held, "abilities", EngineAbilities(concurrent_calls=1))
    engine, answered, there = Held(), [], threading.Semaphore(0)
    thread = EngineThread(engine, lambda answers: (answered.extend(answers), there.release()))
    for name in "abc":
        thread.submit(Prompt((), (), ({"role": "user", "content": "go"},), 0, name), Sampling())
    thread.cancel("b")
    thread.call(lambda: None).result(30)
    engine.released.set()
    for _ in "ac":
        assert there.acquire(timeout=30)
    thread.close()

    assert engine.asked == ["a", "c"]


def test_calls_that_have_begun_may_end_when_a_thread_is_closed():
    """The answers of an API are paid for, even if the prompt was cancelled."""
    engine = Held()
    thread = EngineThread(engine, lambda answers: None)
    for name in "ab":
        thread.submit(Prompt((), (), ({"role": "user", "content": "go"},), 0, name), Sampling())
    while len(engine.asked) < 2:
        time.sleep(0.01)
    thread.cancel("b")
    thread.forget("b")
    threading.Timer(0.2, engine.released.set).start()
    thread.close()

    assert len(engine.answered) == 2


def test_a_thread_that_is_closed_waits_for_no_long_call_and_delivers_no_answer(monkeypatch):
    monkeypatch.setattr("perturn.engines.engine_thread._LAST_S", 0.1)
    engine, answered = Held(), []
    thread = EngineThread(engine, answered.extend)
    thread.submit(Prompt((), (), ({"role": "user", "content": "go"},), 0, "a"), Sampling())
    while not engine.asked:
        time.sleep(0.01)
    closing = threading.Thread(target=thread.close)
    closing.start()
    closing.join(20)
    waits = closing.is_alive()
    engine.released.set()
    for each in thread._work._pool._threads:
        each.join(20)

    assert not waits
    assert answered == []
