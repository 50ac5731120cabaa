"""`async def` in environments: one event loop for the life of a world, wherever it lives."""

import asyncio
import concurrent.futures
import copy
import gc
import json
import os
import signal
import threading
from pathlib import Path

import pytest

import perturn
from perturn.config.sections import Worlds
from perturn.envs.async_worlds import WorldLoop, awaited
from perturn.envs.environment_check import check_environment
from perturn.envs.gymnasium import Gymnasium
from perturn.envs.load_environment import environment_maker, make_environment
from perturn.envs.remote_worlds import PlainWorld
from perturn.envs.trl_factory import TrlFactory
from perturn.envs.world_process import ProcessWorlds
from perturn.episodes.play_many import Job, play
from perturn.episodes.tool_calls import ToolAction, ToolCall, write_action
from perturn.errors import EnvironmentFailure, WorldLost
from perturn.faults import close_world
from perturn.types import Action, EpisodeProtocol, Sampling, Status, Task

from .asynchronous import Async, Decorated, Forgotten, Yielding, make

FILE = str(Path(__file__).with_name("asynchronous.py"))
PLAIN = EpisodeProtocol("p", format="plain", max_turns=5)
LIMITS = Worlds(start_seconds=60, step_seconds=60, episode_seconds=180)


class Script:
    """An engine that answers with the words of the task's id, one per turn."""

    name = "script"

    def generate(self, prompts, sampling):
        """The next word."""
        return [Action(prompt.conversation.partition("#")[0].split("/")[-1]) for prompt in prompts]

    def forget(self, conversation):
        """Nothing is kept."""


def played(make_world, *words, retries=0):
    """The trajectory of each word, said in every turn."""
    jobs = [Job(Task(word), 0) for word in words]
    found = play(
        jobs, Script(), make_world, protocol=PLAIN, sampling=Sampling(), retries=retries, concurrency=2
    )
    return {one.task.id: one for one in found}


def loops():
    """Threads of loops of worlds."""
    return [each for each in threading.enumerate() if each.name == "perturn-world"]


@pytest.mark.parametrize("of", [Async, Decorated, Yielding, make])
def test_a_world_with_async_methods_plays_as_one_without(of):
    """Its connection lasts from reset to close, over several episodes; nothing of the loop is left."""
    before = Async.closed
    with_tasks = awaited(of())
    assert [task.id for task in with_tasks.tasks("train")] == ["train/0", "train/1"]
    close_world(with_tasks)

    found = played(lambda: awaited(of()), "hello", "again", "more")

    assert all(one.success and one.total_reward == 1.5 for one in found.values())
    assert [turn.observation_text for turn in found["hello"].turns] == ["begin", "hello", "hello"]
    assert Async.closed >= before + 2
    assert not loops()


def test_collect_takes_its_class_also_within_a_running_loop(tiny_model, tokenizer):
    """As a notebook has one; the expert is asynchronous too."""

    async def notebook():
        return perturn.collect("expert", Async, n=2, protocol=PLAIN)

    found = asyncio.run(notebook())

    assert [one.success for one in found] == [True, True]
    short = Sampling(temperature=1.0, max_new_tokens=2)
    own = perturn.collect(tiny_model, Async, n=2, tokenizer=tokenizer, protocol=PLAIN, sampling=short)
    assert [one.status for one in own] == [Status.COMPLETED] * 2


@pytest.mark.parametrize("name", ["Async", "make"])
def test_a_section_names_one(name):
    """A class or a factory, with settings."""
    world = make_environment({"name": f"{FILE}:{name}", "size": 3})

    assert len(world.tasks("train")) == 3
    assert all(played(environment_maker({"name": f"{FILE}:{name}"}), "word")["word"].turns)
    close_world(world)


def test_it_lives_in_a_process_of_its_own():
    """What it raises is told, and a hang ends at its time limit."""
    limits = Worlds(start_seconds=60, step_seconds=3, episode_seconds=180)

    found = played(ProcessWorlds({"name": f"{FILE}:Async"}, limits), "hello", "crash", "exit", "hang")

    assert found["hello"].success
    assert "RuntimeError: fell over" in found["crash"].error
    assert "asynchronous.py" in found["crash"].error
    assert "SystemExit: left" in found["exit"].error
    assert "worlds.step_seconds = 3 ran out" in found["hang"].error


def test_what_it_raises_fails_its_episode_alone():
    """In this process too; an exit neither ends the loop nor hangs."""
    found = played(lambda: awaited(Async()), "crash", "exit", "hello")

    assert found["crash"].error == "RuntimeError: fell over"
    assert found["exit"].error == "SystemExit: left"
    assert found["hello"].success


def test_what_crosses_to_another_machine_awaits_it():
    """The side of a node, whose server asks it in a thread."""
    world = PlainWorld(make_environment({"name": f"{FILE}:Async"}))

    assert "expert" in world.facts()["abilities"]
    assert world.ability("expert", [world.tasks("train")[0]]) == ["one", "two", "three"]
    assert world.reset(world.tasks("train")[0], 0)["text"] == "begin"
    assert world.step("go")["text"] == "go"
    world.close()


@pytest.mark.parametrize("of", [Async, make])
def test_it_keeps_the_contract(of):
    """`check-env` awaits it."""
    assert check_environment(of) == []


def test_a_coroutine_that_nothing_awaits_is_an_error():
    """And no observation."""
    found = played(Forgotten, "go")["go"]

    assert found.status is Status.FAILED
    assert "step('go') returned a coroutine, which nothing awaited" in found.error
    assert any("returned a coroutine" in problem for problem in check_environment(Forgotten))


def test_tasks_and_close_that_nothing_awaits_are_errors(caplog):
    """Where a method is not `async def` itself."""
    world = Forgotten()
    world.tasks = world._step
    with pytest.raises(EnvironmentFailure, match=r"tasks\('train'\) returned a coroutine"):
        PlainWorld(world).tasks("train")
    world.close = lambda: world._step("x")
    close_world(world)

    assert "close() returned a coroutine" in caplog.text


def test_a_world_without_async_methods_stays_as_it_is():
    """No thread is started for it, and one that is awaited already is no further."""
    plain, wrapped = Forgotten(), awaited(Async())

    assert awaited(plain) is plain
    assert awaited(wrapped) is wrapped
    assert copy.copy(wrapped).name == "async-1"
    assert not loops()


def test_a_loop_ends_with_its_owner():
    """Where nobody closes it."""
    loop = WorldLoop()
    assert loop.result(asyncio.sleep(0, 7)) == 7
    (thread,) = loops()
    del loop
    gc.collect()
    thread.join(10)

    assert not thread.is_alive()


def test_gymnasiums_interface_may_be_asynchronous():
    """One loop from reset to close."""
    world = Gymnasium(f"{FILE}:Gym", {"train": 1})
    (task,) = world.tasks("train")

    assert world.reset(task).text == "begin"
    assert world.step("go").text == "go"
    world.close()


def test_tools_of_trl_keep_their_connection(tmp_path):
    """Two calls in two turns, and the reward; what a tool raises is its result, as of others."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Ask."}) + "\n")
    world = TrlFactory(f"{FILE}:Tools", {"train": str(tmp_path / "rows.jsonl")})
    (task,) = world.tasks("train")

    for _ in range(2):
        world.reset(task)
        said = [
            world.step(write_action(ToolAction("", (ToolCall("ask", {"text": text}),))))
            for text in ("one", "crash", "two")
        ]
        end = world.step(write_action(ToolAction("done")))

        assert [seen.results for seen in said] == [("one",), ("{'error': 'no such thing'}",), ("two",)]
        assert [seen.reward for seen in said] == [0.0, 1.0, 0.0]
        assert end.success
    world.close()

    assert not loops()


def test_an_interrupted_call_does_not_hold_up_what_follows():
    """Ctrl-C while a call hangs: the loop ends, and the next call begins another."""

    async def hang():
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        await asyncio.sleep(1000)

    loop = WorldLoop()
    with pytest.raises(KeyboardInterrupt):
        loop.result(hang())

    assert not loops()
    assert loop.result(asyncio.sleep(0, "next")) == "next"
    loop.close()


def test_a_coroutine_that_is_cancelled_says_so():
    """By code of its own; the loop goes on."""

    async def cancelled():
        raise asyncio.CancelledError("enough")

    loop = WorldLoop()
    with pytest.raises((asyncio.CancelledError, concurrent.futures.CancelledError)):
        loop.result(cancelled())

    assert loop.result(asyncio.sleep(0, "next")) == "next"
    loop.close()


@pytest.mark.parametrize("during", [0.0, 30.0], ids=["between calls", "during a call"])
def test_a_background_task_that_fails_ends_the_call_and_not_the_next_episode(during):
    """Asyncio then cancels the task that entered the group, in which all calls of the world run."""

    class World:
        async def reset(self):
            self.group = asyncio.TaskGroup()
            await self.group.__aenter__()
            self.reader = self.group.create_task(self.read())
            return "posed"

        async def read(self):
            await asyncio.sleep(0.05)
            raise ConnectionResetError("the server died")

        async def step(self):
            await asyncio.sleep(during)
            return "seen"

    loop, world = WorldLoop(), World()
    loop.result(world.reset())
    if not during:
        concurrent.futures.wait([loop._served], timeout=30)

    with pytest.raises(WorldLost, match="a background task of the environment failed"):
        loop.result(world.step())

    assert loop.result(world.reset()) == "posed"
    loop.close()
