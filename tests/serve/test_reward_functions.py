"""Functions that give the reward of a session: numbers, faults, and those that hang or exit."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from perturn.serve import Endpoint, ServeSettings
from perturn.serve.record import LOST
from perturn.types import Status
from support.endpoint_calls import ask, post, recorded
from support.scripted import Scripted


def test_a_function_gives_the_reward_and_a_function_that_raises_fails_its_episode(tmp_path):
    def judge(trajectory):
        if trajectory.task.id == "bad":
            raise KeyError("no answer")
        return {"reward": 0.5, "success": True}

    with Endpoint(Scripted(), record=tmp_path, reward=judge) as endpoint:
        for name in ("good", "bad"):
            ask(endpoint, f"/s/{name}/v1/chat/completions")
            post(endpoint, f"/s/{name}/reward", {"done": True})
        assert (endpoint.counts()["ended"], endpoint.counts()["failed"]) == (1, 1)

    good, bad = recorded(tmp_path)
    assert (good.total_reward, good.success) == (0.5, True)
    assert bad.status is Status.FAILED
    assert bad.error.startswith("KeyError: the reward function failed")


def test_a_reward_function_that_exits_fails_its_episode_alone(tmp_path):
    def judge(trajectory):
        raise SystemExit(3)

    with Endpoint(Scripted(), record=tmp_path, reward=judge) as endpoint:
        for name in "ab":
            ask(endpoint, f"/s/{name}/v1/chat/completions")
            assert post(endpoint, f"/s/{name}/reward", {"done": True}).status_code == 200
        assert endpoint.counts()["failed"] == 2


@pytest.mark.parametrize(
    "given", ["1.5", True, None, float("nan"), {"success": True}, {"reward": 1.0, "success": "false"}]
)
def test_a_reward_function_that_gives_no_number_fails_its_episode(tmp_path, given):
    with Endpoint(Scripted(), record=tmp_path, reward=lambda episode: given) as endpoint:
        ask(endpoint, "/s/a/v1/chat/completions")
        assert post(endpoint, "/s/a/reward", {"done": True}).status_code == 200

    (episode,) = recorded(tmp_path)
    assert episode.status is Status.FAILED
    assert "reward" in episode.error


@pytest.mark.parametrize(("success", "solved"), [(None, True), (True, True), (False, False)])
def test_a_reward_function_may_leave_success_to_the_reward(tmp_path, success, solved):
    given = {"reward": 1.0, "success": success}
    with Endpoint(Scripted(), record=tmp_path, reward=lambda episode: given) as endpoint:
        ask(endpoint, "/s/a/v1/chat/completions")
        assert post(endpoint, "/s/a/reward", {"done": True}).status_code == 200

    (episode,) = recorded(tmp_path)
    assert (episode.total_reward, episode.success) == (1.0, solved)


def test_a_reward_function_that_hangs_fails_its_episode_alone(tmp_path):
    never = threading.Event()

    def judge(trajectory):
        return never.wait() if trajectory.task.id == "hangs" else 1.0

    with Endpoint(Scripted(), ServeSettings(reward_seconds=0.3), record=tmp_path, reward=judge) as endpoint:
        for name in ("hangs", "good"):
            ask(endpoint, f"/s/{name}/v1/chat/completions")
            assert post(endpoint, f"/s/{name}/reward", {"done": True}).status_code == 200
        counts = endpoint.counts()
    never.set()

    found = {each.task.id: each for each in recorded(tmp_path)}
    assert (counts["ended"], counts["failed"]) == (1, 1)
    assert found["hangs"].status is Status.FAILED
    assert "no reward within reward_seconds=0.3" in found["hangs"].error
    assert found["good"].total_reward == 1.0


def test_an_endpoint_that_is_closed_waits_for_no_reward_function(tmp_path):
    never, asked = threading.Event(), threading.Event()

    def judge(trajectory):
        asked.set()
        never.wait()

    with ThreadPoolExecutor(1) as pool:
        with Endpoint(Scripted(), record=tmp_path, reward=judge) as endpoint:
            ask(endpoint, "/s/a/v1/chat/completions")
            ending = pool.submit(post, endpoint, "/s/a/reward", {"done": True})
            assert asked.wait(20)
        ending.exception()
    never.set()

    (episode,) = recorded(tmp_path)
    assert (episode.status, episode.error) == (Status.FAILED, LOST)
