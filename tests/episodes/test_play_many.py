"""Many episodes at once: none waits for another, none costs another anything, and all worlds are closed."""

import asyncio
import logging
import threading
import time
from dataclasses import dataclass, field

import pytest

from episodes.counting import PROTOCOL, Counter, Script, jobs, up
from perturn.episodes.play_many import Job, play
from perturn.errors import BystanderLost, EngineFailure, EnvironmentFailure, RunError, WorldLost
from perturn.types import Action, Sampling, Status, Task


def start(jobs, engine, make, **settings):
    """The trajectories to come."""
    return play(jobs, engine, make, protocol=PROTOCOL, sampling=Sampling(), **settings)


def by_task(**answers):
    """Answer by the task's id, `up` for all others."""
    return lambda prompt: answers.get(prompt.conversation.split("#")[0], up)(prompt)


def played(answer, jobs, concurrency=2):
    """(trajectories by task, worlds, engine) after playing all jobs."""
    worlds, engine = [], Script(answer)
    found = start(jobs, engine, lambda: Counter(worlds), concurrency=concurrency)
    return {one.task.id: one for one in found}, worlds, engine


def test_seeds_differ_by_turn_and_by_episode():
    """Equal seeds would draw equal numbers in every turn."""
    _, _, engine = played(up, jobs("a", "b", "c"))
    seeds = [prompt.seed for batch in engine.batches for prompt in batch]

    assert len(seeds) == 9
    assert len(set(seeds)) == 9


def test_seeds_are_the_same_when_played_again_and_whatever_plays_beside():
    """A seed is a function of the episode's seed and the turn."""
    by_key = []
    for concurrency in (1, 3):
        _, _, engine = played(up, jobs("a", "b", "c"), concurrency)
        by_key.append({(p.conversation, len(p.turns)): p.seed for batch in engine.batches for p in batch})

    assert by_key[0] == by_key[1]


def test_a_world_that_raises_in_reset_fails_that_episode_only(caplog):
    """The others go on; the failure is logged with its task."""
    found, _, _ = played(up, jobs("a", "broken", "b", "c"))

    assert found["broken"].status is Status.FAILED
    assert found["broken"].error == "EnvironmentFailure: no such room"
    assert found["broken"].turns == ()
    assert [found[name].success for name in "abc"] == [True] * 3
    assert "broken" in caplog.text


def test_a_first_batch_of_broken_tasks_does_not_end_the_play():
    """No prompt to answer at first; the jobs behind them are still played."""
    broken = [Job(Task("broken"), 0, sample) for sample in range(2)]
    found, worlds, engine = played(up, [*broken, *jobs("a")])

    assert found["a"].success
    assert [len(batch) for batch in engine.batches] == [1, 1, 1]
    assert all(world.closed for world in worlds)


@pytest.mark.parametrize("name", ["broken", "crash"])
def test_a_broken_world_is_closed_and_replaced(name):
    """One at a time: the world of the failed episode does not play the next task."""
    crash = by_task(crash=lambda prompt: Action("Action: crash"))
    found, worlds, _ = played(crash, jobs("a", name, "b"), concurrency=1)

    assert found[name].status is Status.FAILED
    assert found["b"].success
    assert len(worlds) == 2
    assert all(world.closed for world in worlds)


def test_a_world_that_cannot_even_close_stops_nothing(monkeypatch):
    """It failed before; closing it is a courtesy."""
    monkeypatch.setattr(Counter, "breaks_on_close", True)
    engine = Script(up)
    steps = start(jobs("broken"), engine, Counter, concurrency=1)

    assert [one.status for one in steps] == [Status.FAILED]


def test_an_engine_failure_fails_that_episode_only():
    """It is thrown into its episode, which keeps the turn before it."""
    fails = lambda prompt: EngineFailure("too long") if prompt.turns else up(prompt)  # noqa: E731
    found, worlds, engine = played(by_task(b=fails), jobs("a", "b", "c"))

    assert found["b"].status is Status.FAILED
    assert found["b"].error == "EngineFailure: too long"
    assert len(found["b"].turns) == 1
    assert found["a"].success
    assert found["c"].success
    assert "b#0" in engine.forgotten
    assert all(world.closed for world in worlds)


def test_at_most_so_many_worlds_as_may_run_at_once():
    """Seven episodes in two worlds, at most two prompts a batch; the worlds are used again."""
    found, worlds, engine = played(up, jobs(*"abcdefg"), concurrency=2)

    assert sorted(found) == list("abcdefg")
    assert len(worlds) == 2
    assert max(map(len, engine.batches)) <= 2
    assert all(world.closed for world in worlds)


def test_every_conversation_that_ended_is_forgotten():
    """An engine may keep keys and values until then."""
    _, _, engine = played(up, jobs("a", "b"))

    assert sorted(engine.forgotten) == ["a#0", "b#0"]


@dataclass
class _Gate(Counter):
    """A counter that waits in `reset` of a task called late, and in `step` of one called slow, for an event."""

    opened: threading.Event = field(default_factory=threading.Event)
    waited: list = field(default_factory=list)

    def reset(self, task, seed):
        self.task = task
        if task.id == "late":
            self.waited.append(self.opened.wait(20))
        return super().reset(task, seed)

    def step(self, action):
        if self.task.id == "slow":
            self.waited.append(self.opened.wait(20))
        return super().step(action)


def test_nobody_waits_for_the_slowest_world():
    """The slow world goes on when all others have ended, and they are handed out before."""
    opened, waited = threading.Event(), []
    make = lambda: _Gate(opened=opened, waited=waited)  # noqa: E731
    found = start(jobs("slow", *"abcde"), Script(up), make, concurrency=3)

    early = [next(found).task.id for _ in range(5)]
    opened.set()

    assert sorted(early) == list("abcde")
    assert [one.task.id for one in found] == ["slow"]
    assert waited == [True] * 3


def test_worlds_start_while_the_model_generates():
    """The late world starts once the engine has been called for another."""
    opened, waited = threading.Event(), []

    def answer(prompt):
        opened.set()
        return up(prompt)

    make = lambda: _Gate(opened=opened, waited=waited)  # noqa: E731
    found = list(start(jobs("late", "a"), Script(answer), make))

    assert [one.success for one in found] == [True, True]
    assert waited == [True]


def test_a_world_lives_in_one_thread_and_the_engine_in_ours():
    """Made, reset, stepped and closed in one thread; worlds of other workers in others."""
    threads = []

    class Noting(Counter):
        def __post_init__(self):
            self.seen = {threading.get_ident()}
            threads.append(self.seen)

        def reset(self, task, seed):
            self.seen.add(threading.get_ident())
            return super().reset(task, seed)

        def step(self, action):
            self.seen.add(threading.get_ident())
            return super().step(action)

        def close(self):
            self.seen.add(threading.get_ident())

    mine = []
    engine = Script(lambda prompt: mine.append(threading.get_ident()) or up(prompt))
    list(start(jobs("a", "b", "c"), engine, Noting, concurrency=2))

    assert set(mine) == {threading.get_ident()}
    assert [len(seen) for seen in threads] == [1, 1]
    assert not threads[0] & threads[1] | set.union(*threads) & set(mine)


class _Sleeper(Counter):
    """A step takes 50 ms; `stepping` has as many items as worlds are in one."""

    stepping: list = []  # noqa: RUF012  shared on purpose

    def step(self, action):
        self.stepping.append(None)
        time.sleep(0.05)
        self.stepping.pop()
        return super().step(action)


def _play_sleepers(count):
    """Play as many episodes, 16 at once, 50 ms per step, 20 ms per call.

    The engine's share, worlds in a step by call.
    """
    beside, spent, began = [], [], time.monotonic()

    def busy(prompt_list, sampling):
        beside.append(len(_Sleeper.stepping))
        at = time.monotonic()
        time.sleep(0.02)
        spent.append(time.monotonic() - at)
        return [up(prompt) for prompt in prompt_list]

    engine = Script(up)
    engine.generate = busy
    list(start(jobs(*[f"t{n}" for n in range(count)]), engine, _Sleeper, concurrency=16))
    return sum(spent) / (time.monotonic() - began), beside


def test_the_engine_is_called_while_worlds_step():
    """In most calls a quarter of the worlds are in a step."""
    _, beside = _play_sleepers(32)

    assert sorted(beside)[len(beside) // 2] >= 4


@pytest.mark.slow  # a machine that is busy otherwise does not keep it
def test_sleeping_worlds_keep_the_engine_busy():
    """Alone the engine would be busy for 2/7 of the time; it is so for 80 % in the best of three plays."""
    assert any(_play_sleepers(64)[0] >= 0.8 for _ in range(3))


class _Stream(Script):
    """Takes prompts on at any time; answers the latest first, one a moment, once there were two."""

    def __init__(self, answer):
        super().__init__(answer)
        self.open, self.most = [], 0

    def submit(self, prompts, sampling):
        self.open += prompts
        self.most = max(self.most, len(self.open))

    def advance(self):
        if not self.open:
            raise AssertionError("nothing to do")
        if self.most < 2:  # until a second one comes, however slowly threads are started
            time.sleep(0.001)
            return []
        prompt = self.open.pop()
        return [(prompt, *self.generate([prompt], None))]


def test_an_engine_that_streams_is_given_prompts_as_they_come():
    """Answers in another order reach their own episodes; the trajectories are those of batches."""
    names = [f"t{n}" for n in range(9)]
    answers = by_task(
        t3=lambda prompt: Action("Action: nothing"), t5=lambda prompt: EngineFailure("out of room")
    )
    engine = _Stream(answers)
    found = {one.task.id: one for one in start(jobs(*names), engine, Counter, concurrency=4)}

    assert found == played(answers, jobs(*names), concurrency=4)[0]
    assert sorted(engine.forgotten) == sorted(f"{name}#0" for name in names)
    assert 2 <= engine.most <= 4


@pytest.mark.parametrize(
    ("losses", "retries", "plays"),
    [
        ([WorldLost], 0, 1),
        ([WorldLost], 1, 2),
        ([WorldLost] * 3, 2, 3),
        ([BystanderLost] * 3, 0, 4),
        ([BystanderLost, WorldLost, BystanderLost], 1, 4),
        ([EnvironmentFailure], 3, 1),
        ([BystanderLost] * 99, 1, 1 + 16 + 1),
    ],
)
def test_an_episode_whose_world_was_lost_is_played_again(losses, retries, plays):
    """Losses count against `retries`, but for those to another's fault, up to 16; other failures are final."""
    coming, worlds = list(losses), []

    class Mortal(Counter):
        def step(self, action):
            if coming:
                raise coming.pop(0)("gone")
            return super().step(action)

    found = list(start(jobs("a"), Script(up), lambda: Mortal(worlds), retries=retries))

    assert len(found) == 1
    assert found[0].success is (plays > len(losses))
    assert len(worlds) == plays


def test_worlds_are_closed_when_the_consumer_stops_early():
    """Closing the generator runs its clean-up."""
    worlds = []
    steps = start(jobs(*"abcd"), Script(up), lambda: Counter(worlds), concurrency=2)
    next(steps)
    steps.close()

    assert len(worlds) == 2
    assert all(world.closed for world in worlds)


def test_worlds_are_closed_when_the_engine_raises():
    """An engine that cannot answer at all stops the play with its own error."""

    def breaks(prompt):
        raise EngineFailure("out of memory")

    worlds = []
    steps = start(jobs("a", "b"), Script(breaks), lambda: Counter(worlds))
    with pytest.raises(EngineFailure, match="out of memory"):
        list(steps)

    assert len(worlds) == 2
    assert all(world.closed for world in worlds)


def test_worlds_are_closed_when_one_of_them_cannot_start():
    """The second world raises as it is made; the first is released."""
    worlds = []

    def make():
        if worlds:
            raise EnvironmentFailure("no port is free")
        return Counter(worlds)

    with pytest.raises(EnvironmentFailure, match="no port is free"):
        list(start(jobs("a", "b"), Script(up), make, concurrency=2))

    assert worlds[0].closed


class _Panic(BaseException):
    """As extensions written in Rust raise; asyncio's CancelledError is no Exception either."""


@pytest.mark.parametrize("error", [_Panic("index 3"), asyncio.CancelledError(), SystemExit(7)])
@pytest.mark.parametrize("call", ["reset", "step"])
def test_what_a_world_raises_fails_its_episode_even_if_it_is_no_exception(monkeypatch, error, call):
    """Ctrl-C alone ends the play."""

    def broken(world, *_):
        raise error

    monkeypatch.setattr(Counter, call, broken)
    found, _, _ = played(up, jobs("a", "b"))

    assert [found[key].status for key in "ab"] == [Status.FAILED] * 2
    assert found["a"].error.startswith(type(error).__name__)
    monkeypatch.setattr(Counter, call, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        played(up, jobs("a"))


def test_a_world_that_says_that_the_run_cannot_go_on_stops_it(monkeypatch):
    """A `RunError` is nobody's bad episode: it reaches the caller, and no trajectory is made of it."""

    def reset(world, task, seed):
        raise RunError("no machine is left")

    monkeypatch.setattr(Counter, "reset", reset)

    with pytest.raises(RunError, match="no machine is left"):
        played(up, jobs("a", "b"))


def test_all_worlds_are_closed_even_if_one_cannot_close(monkeypatch, caplog):
    """Two worlds whose close raises: both are closed, and the trajectories have been handed out."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(Counter, "breaks_on_close", True)
    found, worlds, _ = played(up, jobs("a", "b"))

    assert sorted(found) == ["a", "b"]
    assert [world.closed for world in worlds] == [True, True]
