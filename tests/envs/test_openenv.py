"""OpenEnv servers: a real one of openenv 0.10 where it is installed, and one of ours that says what it must not."""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest
from websockets.sync.server import serve

from perturn.envs.environment_check import check_environment
from perturn.envs.openenv import OpenEnv
from perturn.episodes.episode import Job, episode
from perturn.episodes.play_many import play
from perturn.episodes.replay import play_script
from perturn.errors import ConfigError, EnvironmentFailure, WorldLost
from perturn.types import Action, EpisodeProtocol, Sampling
from support.ports import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
FIELDS = {"action_field": "message", "text_field": "reply"}
PYTHON = os.environ.get("PERTURN_OPENENV_PYTHON") or (sys.executable if find_spec("openenv") else None)
PROTOCOL = EpisodeProtocol("guess", "action", max_turns=12)


@pytest.fixture(scope="module")
def real():
    """The address of the documentation's server, run by openenv itself."""
    if PYTHON is None:
        pytest.skip("openenv is not installed: set PERTURN_OPENENV_PYTHON to a Python with openenv==0.10.0")
    port = free_port()
    command = [PYTHON, "-m", "uvicorn", "openenv_server:app", "--port", str(port), "--log-level", "warning"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.Popen(command, cwd=EXAMPLES, env=environment)
    url = f"http://127.0.0.1:{port}"
    until = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < until:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            break
        except OSError:
            time.sleep(0.2)
    yield url
    process.terminate()
    process.wait(timeout=30)


class Counter:
    """An engine that guesses 1, 2, 3, ..."""

    name = "counter"

    def generate(self, prompts, sampling):
        """The next number."""
        return [Action(f"Action: {len(prompt.turns) + 1}") for prompt in prompts]

    def forget(self, conversation):
        """Nothing is kept."""

    def close(self):
        """Nothing is held."""


def test_a_real_server_keeps_the_contract(real):
    assert check_environment(lambda: OpenEnv(real, **FIELDS)) == []


def test_episodes_are_played_on_a_real_server(real):
    """Eight sessions at once; the seed is the number, so task n takes n mod 12 + 1 guesses."""
    worlds = OpenEnv(real, **FIELDS)
    jobs = [Job(task, 0) for task in worlds.tasks("train")[:8]]

    played = list(
        play(
            jobs,
            Counter(),
            lambda: OpenEnv(real, **FIELDS),
            protocol=PROTOCOL,
            sampling=Sampling(),
            concurrency=8,
        )
    )

    assert {one.task.id: len(one.turns) for one in played} == {f"train/{n}": n + 1 for n in range(8)}
    assert all(one.success and one.total_reward == 1.0 for one in played)


def test_a_real_server_that_refuses_is_heard(real):
    """A field its action does not have."""
    world = OpenEnv(real, action_field="words", text_field="reply")
    world.reset(world.tasks("train")[0])
    with pytest.raises(EnvironmentFailure, match="refused step: "):
        world.step("3")
    world.close()


@pytest.fixture
def fake():
    """Starts a server that answers every message with the same; returns its address."""
    servers = []

    def start(answer):
        def handle(connection):
            for message in connection:
                heard.append(json.loads(message))
                if answer is None:
                    return
                connection.send(json.dumps(answer))

        servers.append(serve(handle, "127.0.0.1", 0))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].socket.getsockname()[1]}"

    heard = start.heard = []
    yield start
    for server in servers:
        server.shutdown()


def observation(reply="hello", **rest):
    return {
        "type": "observation",
        "data": {"observation": {"reply": reply}, "reward": None, "done": False, **rest},
    }


def test_success_of_none_says_nothing(fake):
    """An optional field that a server leaves out of account is null in JSON."""
    world = OpenEnv(fake(observation(reward=1.0, done=True, metadata={"success": None})), **FIELDS)
    world.reset(world.tasks("train")[0])
    seen = world.step("go")
    world.close()

    assert (seen.reward, seen.terminated, seen.success) == (1.0, True, True)


def test_messages_are_those_of_openenv(fake):
    """Reset with the task's seed, step with the action's field; an absent reward is 0."""
    world = OpenEnv(fake(observation()), **FIELDS, seeds={"train": 5, "test": 5})
    posed = world.reset(world.tasks("test")[1], 0)
    seen = world.step("go")
    world.close()

    assert (posed.text, seen.reward, seen.terminated) == ("hello", 0.0, False)
    assert fake.heard == [
        {"type": "reset", "data": {"seed": 6, "episode_id": "test/1"}},
        {"type": "step", "data": {"message": "go"}},
    ]


@pytest.mark.parametrize(
    ("rest", "success"),
    [
        ({"done": True, "reward": 1}, True),
        ({"done": True, "reward": 0}, False),
        ({"done": True, "reward": True, "metadata": {"success": False}}, False),
        ({"reward": 0.5}, False),
    ],
)
def test_success_is_said_or_follows_from_the_reward(fake, rest, success):
    world = OpenEnv(fake(observation(**rest)), **FIELDS)
    world.reset(world.tasks("train")[0])

    assert world.step("go").success is success
    world.close()


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (observation(reply=7), EnvironmentFailure, "observation.reply is 7 of type int, not a text"),
        (observation(reward="much"), EnvironmentFailure, "the reward is 'much', which is not a number"),
        (
            {"type": "observation", "data": {"observation": {"text": "a"}}},
            EnvironmentFailure,
            "has no field 'reply'; it has text. Set environment.text_field",
        ),
        ({"type": "error", "data": {"message": "no room"}}, EnvironmentFailure, "refused reset: no room"),
        ([], EnvironmentFailure, "refused reset"),
        (None, WorldLost, "was lost in reset"),
    ],
)
def test_a_strange_answer_is_refused_with_a_remedy(fake, answer, error, says):
    world = OpenEnv(fake(answer), **FIELDS)
    with pytest.raises(error, match=says):
        world.reset(world.tasks("train")[0])
    world.close()


def test_a_server_that_is_not_there_is_named():
    world = OpenEnv(f"http://127.0.0.1:{free_port()}", **FIELDS)
    with pytest.raises(EnvironmentFailure, match=r"no OpenEnv server answers at ws://127.*start the server"):
        world.reset(world.tasks("train")[0])


def test_a_session_begins_anew_after_it_was_lost(fake):
    """As `play_again` needs it."""
    world = OpenEnv(fake(None), **FIELDS)
    played = [
        play_script(episode(world, Job(world.tasks("train")[0], 0), protocol=PROTOCOL), [], OSError())
        for _ in range(2)
    ]

    assert all(one.error.startswith("WorldLost: the session") for one in played)


def test_a_wrong_address_is_refused():
    with pytest.raises(ConfigError, match="base_url must begin with http"):
        OpenEnv("localhost:8000", **FIELDS)
