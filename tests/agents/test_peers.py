"""Tasks of other libraries: what their own evaluation says of recorded answers is what Perturn recorded.

Each library is in an interpreter of its own: PERTURN_VERIFIERS_PYTHON, PERTURN_INSPECT_PYTHON, PERTURN_OPENENV_PYTHON.
"""

import json
import os
import random
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from perturn.envs.load_environment import make_environment
from perturn.errors import ConfigError
from perturn.serve import Endpoint
from perturn.types import Action
from support.ports import free_port

from .playing import Scripted, played

EXAMPLES = Path(__file__).parents[2] / "examples/agents"
PLACES = ("cabinet 1", "drawer 1", "drawer 2", "shelf 1")


def python_of(name):
    """The interpreter that has a library; without one the test is skipped."""
    found = os.environ.get(f"PERTURN_{name.upper()}_PYTHON")
    if found is None:
        pytest.skip(f"set PERTURN_{name.upper()}_PYTHON to a Python with {name}")
    return found


class Recorded:
    """Answers by what the task says first and the number of turns before."""

    def __init__(self, tools=("go_to", "fly")):
        self.answers, self.tools = {}, tools

    def improvise(self, prompt):
        """Answer with a call, with a place in words or with nothing of use, and keep the answer."""
        key = place_of(prompt)
        drawn = random.Random(repr(key))
        place = drawn.choice(PLACES)
        call = json.dumps({"name": "go_to", "arguments": {"place": place}})
        wrong = json.dumps({"name": drawn.choice(self.tools), "arguments": {"to": place}})
        calls = [f"<tool_call>\n{each}\n</tool_call>" for each in (call, call, call, wrong)]
        self.answers[key] = drawn.choice([*calls, f"go to {place}", "hm"])
        return Action(self.answers[key], (1, 2), (-0.5, -0.25))

    def replay(self, prompt):
        """Give the answer again."""
        return Action(self.answers[place_of(prompt)], (1, 2), (-0.5, -0.25))


def place_of(prompt):
    """What the task says first, and the number of turns."""
    said = prompt.turns[0].observation if prompt.turns else prompt.observation
    return said[0]["content"], len(prompt.turns)


def scored_here(section, recorded):
    """The rewards of the episodes that Perturn played, by task."""
    found = played(section, Scripted(recorded.improvise))
    turns = [turn for one in found.values() for turn in one.turns]
    rewards = {key[0].rpartition("/")[2]: one.total_reward for key, one in found.items()}

    assert [one.error for one in found.values()] == [None] * 16
    assert any(message["role"] == "tool" for turn in turns for message in turn.observation)
    assert len(set(rewards.values())) > 2
    return rewards


def run_peer(command, endpoint, **variables):
    """Run a program of the library against an endpoint; return what it prints."""
    hidden = ("PYTHONPATH", "PERTURN")
    own = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    ended = subprocess.run(
        [str(each) for each in command],
        env={**own, "OPENAI_BASE_URL": endpoint.url(), "OPENAI_API_KEY": endpoint.key, **variables},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.slow
def test_verifiers_scores_recorded_answers_alike(tmp_path):
    """By `vf-eval`, with the same configuration."""
    python, source = python_of("verifiers"), EXAMPLES / "verifiers_coin/test.toml"

    recorded = Recorded()
    section = {"name": "agent", "adapter": "verifiers", "python": python, "tasks": str(source)}

    rewards = scored_here(section, recorded)

    with Endpoint(Scripted(recorded.replay)) as endpoint:
        command = [
            Path(python).with_name("vf-eval"),
            "@",
            source,
            "--no-push",
            "--no-rich",
            "--output-dir",
            tmp_path,
        ]
        client = ["--client.base-url", endpoint.url(), "--client.api-key-var", "OPENAI_API_KEY"]
        run_peer([*command, *client], endpoint, PYTHONPATH=str(source.parent))
    (file,) = tmp_path.rglob("traces.jsonl")
    said = {}
    for line in file.read_text().splitlines():
        (trace,) = json.loads(line)["traces"]
        scores = trace["rewards"].values()
        said[trace["task"]["data"]["id"]] = sum(each["score"] * each["weight"] for each in scores)
    assert said == pytest.approx(rewards, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("harness", ["null", "bash"])
def test_a_bundled_harness_of_verifiers_calls_tools_behind_mcp(harness, tmp_path, monkeypatch):
    """`uv` installs it; the second place is right, and the third answer ends the talk."""
    python, source = python_of("verifiers"), tmp_path / "mcp.toml"
    shutil.copy(EXAMPLES / "verifiers_coin/mcp_coin_taskset.py", tmp_path)
    source.write_text((EXAMPLES / "verifiers_coin/mcp.toml").read_text().replace('"null"', f'"{harness}"'))
    monkeypatch.setenv("PATH", f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}")

    def say(prompt):
        if len(prompt.turns) == 2:
            return Action("Done.", (1, 2), (-0.5, -0.25))
        place = ("drawer 2", "shelf 1")[len(prompt.turns)]
        names = [tool["function"]["name"] for tool in prompt.tools]
        call = {"name": next(each for each in names if "go_to" in each), "arguments": {"place": place}}
        return Action(f"<tool_call>\n{json.dumps(call)}\n</tool_call>", (1, 2), (-0.5, -0.25))

    section = {"name": "agent", "adapter": "verifiers", "python": python, "tasks": str(source)}
    (episode,) = played(section, Scripted(say)).values()

    heard = [turn.observation[-1]["content"] for turn in episode.turns[1:]]
    assert (episode.error, heard) == (None, ["There is no coin here.", "You find the coin."])
    assert episode.total_reward == 1


@pytest.mark.slow
def test_inspect_scores_recorded_answers_alike(tmp_path):
    """By `inspect eval` of the same task."""
    python, source = python_of("inspect"), EXAMPLES / "inspect_coin.py"

    recorded = Recorded()
    section = {"name": "agent", "adapter": "inspect", "python": python, "tasks": f"{source}@test"}

    rewards = scored_here(section, recorded)

    with Endpoint(Scripted(recorded.replay)) as endpoint:
        command = [Path(python).with_name("inspect"), "eval", f"{source}@test", "--log-format", "json"]
        model = ["--model", "openai-api/openai/policy", "--log-dir", tmp_path, "--display", "plain"]
        run_peer([*command, *model], endpoint)
    (file,) = tmp_path.rglob("*.json")
    said = {each["id"]: each["scores"]["coin"]["value"] for each in json.loads(file.read_text())["samples"]}
    assert said == pytest.approx(rewards, abs=1e-12)


@pytest.fixture
def coin_server():
    """The address of the example's server, run by openenv itself."""
    python = python_of("openenv")
    port = free_port()
    command = [
        python,
        "-m",
        "uvicorn",
        "openenv_coin_server:app",
        "--port",
        str(port),
        "--log-level",
        "warning",
    ]
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.Popen(command, cwd=EXAMPLES, env=own, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 180
    while process.poll() is None and time.monotonic() < until:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            break
        except OSError:
            time.sleep(0.2)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(timeout=30)


@pytest.mark.slow
def test_openenv_scores_recorded_answers_alike(coin_server, tmp_path):
    """By OpenEnv's own collection, over its loop of tool calls; it gives up episodes without any reward."""
    python = python_of("openenv")

    recorded = Recorded(tools=["go_to"])  # OpenEnv's loop gives up an episode that calls an unknown tool
    section = {"name": "agent", "adapter": "openenv", "python": python, "tasks": f"{coin_server}#0:16"}

    rewards = scored_here(section, recorded)

    with Endpoint(Scripted(recorded.replay)) as endpoint:
        run_peer(
            [python, Path(__file__).with_name("openenv_collect.py"), coin_server, "16", tmp_path], endpoint
        )
    said = dict.fromkeys(rewards, 0.0)
    for line in (tmp_path / "results.jsonl").read_text().splitlines():
        record = json.loads(line)
        said[f"seed-{int(record['episode_id'].rpartition('-')[2])}"] = record["reward"]
    assert said == pytest.approx(rewards, abs=1e-12)


@pytest.mark.slow
def test_an_answer_without_calls_may_be_an_argument_of_a_tool(coin_server):
    """`@go_to` after the seeds; a tool or a server that is not there is named before any work."""
    section = {"name": "agent", "adapter": "openenv", "python": python_of("openenv")}
    policy = Scripted(lambda prompt: Action("go to shelf 1", (1, 2), (-0.5, -0.25)))

    found = played(section | {"tasks": f"{coin_server}#0:4@go_to"}, policy)

    assert [round(one.total_reward, 9) for one in found.values()] == [1.1, 0.4, 1.1, 0.4]
    assert {len(one.turns) for one in found.values()} == {1, 4}
    for tasks, said in {
        f"{coin_server}#0:4@fly": "has no tool 'fly' with an argument; it has go_to",
        "http://127.0.0.1:9#0:4": "no OpenEnv server answers at http://127.0.0.1:9",
        coin_server: "expected an address and seeds",
    }.items():
        with pytest.raises(ConfigError, match=said):
            make_environment(section | {"tasks": tasks}).tasks("train")
