"""`perturn serve` as a process: it serves a policy, and a kill loses no session that ended."""

import os
import signal
import subprocess
import sys

import openai
import psutil
import pytest

from perturn.data.run_paths import RunPaths
from perturn.data.store import read_trajectories
from perturn.serve.record import LOST
from perturn.types import Status

pytestmark = pytest.mark.slow  # each starts Python, and loads a policy


def recorded(folder):
    """Episodes in a folder that an endpoint records in."""
    return read_trajectories(RunPaths(folder).trajectories("explore"))


def started(tmp_path, *words):
    """The process, its base URL and its key."""
    command = [
        sys.executable,
        "-m",
        "perturn",
        "serve",
        *words,
        "--port",
        "0",
        "--record",
        str(tmp_path / "record"),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "PERTURN_API_KEY"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment | {"PYTHONUNBUFFERED": "1"}
    )
    said = {}
    for line in process.stdout:
        if line.startswith("Ctrl-C"):
            break
        key, _, value = line.strip().partition(":")
        said[key] = value.strip()
    process.stdout.close()
    return process, said["OpenAI"].partition("=")[2].removesuffix("/v1"), said["key"]


def play(address, key, name):
    """Two turns of a session."""
    with openai.OpenAI(base_url=f"{address}/s/{name}/v1", api_key=key) as client:
        messages = [{"role": "user", "content": "You are in the middle of a room."}]
        for _ in range(2):
            said = (
                client.chat.completions.create(model="p", messages=messages, max_tokens=8).choices[0].message
            )
            messages += [said, {"role": "user", "content": "Nothing happens."}]


def end(address, key, name, reward):
    """Give the episode its reward, which ends it."""
    with openai.OpenAI(base_url=f"{address}/s/{name}", api_key=key) as client:
        client.post("/reward", body={"reward": reward}, cast_to=object)


def test_a_kill_loses_no_session_that_ended(tmp_path):
    process, address, key = started(tmp_path, "tiny-agent")
    try:
        for name in ("one", "two", "open"):
            play(address, key, name)
        end(address, key, "one", 1.0)
        end(address, key, "two", 0.0)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    again, address, key = started(tmp_path, "tiny-agent")
    try:
        play(address, key, "open")
        end(address, key, "open", 1.0)
    finally:
        again.send_signal(signal.SIGINT)
        assert again.wait(30) == 130

    found = {each.key: each for each in recorded(tmp_path / "record")}
    assert set(found) == {("one", 0), ("two", 0), ("open", 0), ("open", 1)}
    assert [found["one", 0].total_reward, found["two", 0].total_reward] == [1.0, 0.0]
    assert (found["open", 0].status, found["open", 0].error) == (Status.FAILED, LOST)
    assert all(turn.action.logprobs for turn in found["open", 1].turns)
    assert found["one", 0].policy.startswith("tiny-agent@")


def test_what_cannot_be_served_is_told_in_one_line(tmp_path):
    def refused(*words):
        command = [sys.executable, "-m", "perturn", "serve", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        return done.returncode, done.stderr

    code, said = refused("tiny-agent", "engin.name=local")
    assert (code, "engin is not a section of a served model. Did you mean 'engine'?" in said) == (2, True)
    code, said = refused("tiny-agent", "--host", "0.0.0.0", "--port", "0")
    assert code == 2
    assert "PERTURN_API_KEY" in said
    code, said = refused("tiny-agent", "--reward", "nowhere:judge")
    assert (code, "nowhere:judge" in said) == (2, True)


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_has_open_sessions_recorded(tmp_path, kind):
    process, address, key = started(tmp_path, "tiny-agent")
    play(address, key, "open")
    process.send_signal(kind)

    assert process.wait(30) == 130
    (episode,) = recorded(tmp_path / "record")
    assert (episode.status, episode.error, len(episode.turns)) == (Status.FAILED, LOST, 2)


def test_the_folder_of_an_endpoint_is_read_as_a_run(tmp_path):
    process, address, key = started(tmp_path, "tiny-agent")
    try:
        for name in ("one", "one", "two"):
            play(address, key, name)
            end(address, key, name, float(name == "one"))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()

    def said(*words):
        done = subprocess.run(
            [sys.executable, "-m", "perturn", *words], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "explored: 3 rows, 3 usable" in said("inspect", "record", "--check")
    assert "weights by turn" in said("credit", "record", "credit.name=uniform")
    assert said("report", "record").strip().endswith("report.html")
    assert "uniform" in (tmp_path / "record" / "report.html").read_text()


def test_the_end_of_the_engines_process_ends_the_command(tmp_path):
    """The process of the engine is killed: the request fails, the command says why, its session is recorded."""
    process, address, key = started(tmp_path, "tiny-agent")
    play(address, key, "before")
    (child,) = [
        each for each in psutil.Process(process.pid).children() if "spawn_main" in str(each.cmdline())
    ]

    child.kill()

    assert process.wait(60) == 2
    (episode,) = recorded(tmp_path / "record")
    assert (episode.status, len(episode.turns)) == (Status.FAILED, 2)
