"""Sessions whose episode cannot be written at their end, because the disk is full."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from perturn.serve import Endpoint, ServeSettings
from perturn.types import Status
from support.endpoint_calls import ASKED, ask, post, recorded
from support.scripted import Scripted

WRITE = "perturn.io.append_file.append_whole"


def full(descriptor, data):
    """Write nothing, as a full disk does."""
    raise OSError(28, "No space left on device")


def test_a_full_disk_loses_no_session(tmp_path, monkeypatch):
    with Endpoint(Scripted(), record=tmp_path) as endpoint:
        ask(endpoint, "/s/a/v1/chat/completions")
        with monkeypatch.context() as broken:
            broken.setattr(WRITE, full)
            refused = post(endpoint, "/s/a/reward", {"reward": 1.0})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_recorded")
        assert post(endpoint, "/s/a/reward", {"reward": 1.0}).status_code == 200

    (episode,) = recorded(tmp_path)
    assert (len(episode.turns), episode.total_reward) == (1, 1.0)


def test_a_session_cannot_be_opened_anew_while_it_is_recorded(tmp_path, monkeypatch):
    """Otherwise the new session has its name, and its turns are lost if it cannot be recorded."""
    asked, go = threading.Event(), threading.Event()

    def judge(trajectory):
        asked.set()
        go.wait(20)
        return 1.0

    with Endpoint(Scripted(), record=tmp_path, reward=judge) as endpoint, ThreadPoolExecutor(1) as pool:
        ask(endpoint, "/s/a/v1/chat/completions")
        with monkeypatch.context() as broken:
            broken.setattr(WRITE, full)
            ending = pool.submit(post, endpoint, "/s/a/reward", {"done": True})
            assert asked.wait(20)
            meanwhile = post(endpoint, "/s/a/v1/chat/completions", {"model": "p", "messages": ASKED})
            go.set()
            assert ending.result().status_code == 503
        assert post(endpoint, "/s/a/reward", {"done": True}).status_code == 200

    assert (meanwhile.status_code, meanwhile.json()["error"]["message"]) == (
        409,
        "session 'a' is being recorded.",
    )
    (episode,) = recorded(tmp_path)
    assert (len(episode.turns), episode.total_reward) == (1, 1.0)


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Open an endpoint, and end a session of one turn while the disk is full; (endpoint, episodes the judge saw)."""
    opened, judged = [], []

    def begin(path="/s/a", judge=False, **settings):
        def reward(trajectory):
            judged.append(trajectory)
            return 1.0

        settings = ServeSettings(**settings)
        endpoint = Endpoint(Scripted(), settings, record=tmp_path, reward=reward if judge else None)
        opened.append(endpoint)
        endpoint.__enter__()
        ask(endpoint, f"{path}/v1/chat/completions")
        with monkeypatch.context() as broken:
            broken.setattr(WRITE, full)
            body = {"done": True} if judge else {"reward": 1.0}
            assert post(endpoint, f"{path}/reward", body).status_code == 503
        return endpoint, judged

    yield begin
    for endpoint in opened:
        endpoint.__exit__(None, None, None)


def test_an_ended_session_is_recorded_as_it_ended_when_the_endpoint_closes(refused, tmp_path):
    """It is not lost: its agent had ended it and given its reward."""
    endpoint, _ = refused()
    endpoint.__exit__(None, None, None)

    (episode,) = recorded(tmp_path)
    assert (episode.status, episode.total_reward, episode.success) == (Status.COMPLETED, 1.0, True)
    assert (episode.terminated, episode.truncated) == (True, False)


def test_an_ended_session_is_not_cut_later_and_not_judged_again(refused, tmp_path):
    endpoint, judged = refused(judge=True, idle_seconds=1.0)
    until = time.monotonic() + 30
    while not (found := list(recorded(tmp_path))) and time.monotonic() < until:
        time.sleep(0.05)

    (episode,) = found
    assert (episode.terminated, episode.truncated, episode.total_reward) == (True, False, 1.0)
    assert len(judged) == 1
    assert endpoint.counts().get("ended") == 1


def test_a_further_turn_reopens_a_session_that_could_not_be_recorded(refused, tmp_path):
    """Its end is then the new one, and its responses can be continued."""
    endpoint, _ = refused()
    answer = ask(endpoint, "/s/a/v1/chat/completions")
    assert answer.status_code == 200
    assert post(endpoint, "/s/a/reward", {"reward": 0.5}).status_code == 200

    (episode,) = recorded(tmp_path)
    assert (len(episode.turns), episode.total_reward) == (2, 0.5)


def test_a_line_that_was_written_although_the_call_failed_is_replaced(tmp_path, monkeypatch):
    """`fsync` may fail after the line is in the file; the session goes on, and its later turns count."""

    def failing(descriptor):
        raise OSError(5, "Input/output error")

    with Endpoint(Scripted(), record=tmp_path) as endpoint:
        ask(endpoint, "/s/a/v1/chat/completions")
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", failing)
            assert post(endpoint, "/s/a/reward", {"reward": 1.0}).status_code == 503
        ask(endpoint, "/s/a/v1/chat/completions")
        assert post(endpoint, "/s/a/reward", {"reward": 0.25}).status_code == 200

    (episode,) = recorded(tmp_path)
    assert (len(episode.turns), episode.total_reward) == (2, 0.25)


def test_an_automatic_session_that_could_not_be_recorded_is_continued(tmp_path, monkeypatch):
    """Requests that name no session find it again by their conversation."""
    with Endpoint(Scripted(), record=tmp_path) as endpoint:
        first = ask(endpoint)
        name = first.headers["x-perturn-session"]
        with monkeypatch.context() as broken:
            broken.setattr(WRITE, full)
            assert post(endpoint, f"/s/{name}/reward", {"reward": 1.0}).status_code == 503
        said = first.json()["choices"][0]["message"]
        messages = [*ASKED, {"role": "assistant", "content": said["content"]}, *ASKED]
        again = ask(endpoint, messages=messages)

        assert again.headers["x-perturn-session"] == name
        assert post(endpoint, f"/s/{name}/reward", {"reward": 1.0}).status_code == 200

    (episode,) = recorded(tmp_path)
    assert len(episode.turns) == 2


def test_a_fault_that_is_not_the_disks_loses_no_session_either(tmp_path, monkeypatch):
    """The session stays open, and sessions still expire afterwards."""
    with Endpoint(Scripted(), ServeSettings(idle_seconds=1.0), record=tmp_path) as endpoint:
        ask(endpoint, "/s/a/v1/chat/completions")
        with monkeypatch.context() as broken:
            broken.setattr(endpoint._record, "ended", lambda trajectory: 1 / 0)
            refused = post(endpoint, "/s/a/reward", {"reward": 1.0})
            time.sleep(1.5)  # it expires meanwhile, and cannot be recorded
        assert refused.status_code == 503
        assert "the session stays open: ZeroDivisionError: division by zero" in refused.text
        until = time.monotonic() + 30
        while not (found := list(recorded(tmp_path))) and time.monotonic() < until:
            time.sleep(0.05)

    assert [episode.total_reward for episode in found] == [1.0]


def test_an_endpoint_that_cannot_begin_says_so(tmp_path, monkeypatch):
    """It does not wait forever."""

    def fail(sessions):
        raise RuntimeError("no loop")

    monkeypatch.setattr("perturn.serve.session_manager.SessionManager.start", fail)
    with pytest.raises(RuntimeError, match="no loop"):
        Endpoint(Scripted(), record=tmp_path)
    monkeypatch.undo()

    with Endpoint(Scripted(), record=tmp_path) as endpoint:  # the folder is not held
        assert ask(endpoint, "/s/a/v1/chat/completions").status_code == 200
