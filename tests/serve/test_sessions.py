"""Sessions: names, seeds, rewards, states, limits, and agents that share one."""

import json
import shutil
import socket
import threading
import time

import httpx2 as httpx
import openai
import pytest

from perturn.data.run_paths import RunPaths
from perturn.errors import RunError
from perturn.serve import Endpoint, ServeSettings
from perturn.serve.record import LOST, Record
from perturn.serve.request_parser import read_conversation
from perturn.types import Sampling, Status, Task
from support.endpoint_calls import ASKED, ask, post, recorded, text
from support.scripted import Scripted, action


def test_a_session_is_named_by_path_header_or_key(endpoint):
    by_path = ask(endpoint, "/s/path/v1/chat/completions")
    by_header = post(
        endpoint, "/v1/chat/completions", {"model": "p", "messages": ASKED}, **{"X-Perturn-Session": "header"}
    )
    by_key = post(
        endpoint,
        "/v1/chat/completions",
        {"model": "p", "messages": ASKED},
        Authorization=f"Bearer {endpoint.session_key('key')}",
    )

    found = [each.headers["x-perturn-session"] for each in (by_path, by_header, by_key)]
    assert found == ["path", "header", "key"]


def test_a_key_of_one_session_opens_no_other(endpoint):
    refused = post(
        endpoint,
        "/s/mine/v1/chat/completions",
        {"model": "p", "messages": ASKED},
        Authorization=f"Bearer {endpoint.session_key('yours')}",
    )

    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "session_mismatch")


def test_without_a_name_a_conversation_is_a_session(endpoint, engine):
    answers = iter(("a", "b", "c"))
    engine.answer = lambda prompt: next(answers)

    first, other = ask(endpoint), ask(endpoint)
    longer = [*ASKED, {"role": "assistant", "content": "a"}, {"role": "user", "content": "And?"}]
    second = ask(endpoint, messages=longer)

    names = [each.headers["x-perturn-session"] for each in (first, other, second)]
    assert names[0] == names[2] != names[1]
    assert len(engine.asked[2].turns) == 1


def test_rewards_and_states_reach_the_trajectory(tmp_path):
    with Endpoint(Scripted(), record=tmp_path) as endpoint:
        assert post(endpoint, "/s/t/state", {"state": "hall"}, "PUT").status_code == 200
        first = ask(endpoint, "/s/t/v1/chat/completions").json()
        longer = [*ASKED, first["choices"][0]["message"], {"role": "user", "content": "x"}]
        ask(endpoint, "/s/t/v1/chat/completions", longer)
        given = post(endpoint, "/s/t/reward", {"response": first["id"], "reward": 0.25})
        shown = httpx.get(f"{endpoint.address}/s/t", headers={"x-api-key": endpoint.key}).json()
        ended = post(endpoint, "/s/t/reward", {"reward": 1.0})
        late = post(endpoint, "/s/t/reward", {"reward": 2.0})

    (episode,) = recorded(tmp_path)
    assert (given.json()["done"], ended.json()["done"], late.status_code) == (False, True, 409)
    assert [turn.state_key for turn in episode.turns] == ["hall", None]
    assert [turn.reward for turn in episode.turns] == [0.25, 1.0]
    assert (episode.total_reward, episode.success, episode.terminated) == (1.25, True, True)
    assert (episode.task.id, episode.environment, episode.protocol) == ("t", "agent", "agent")
    assert (shown["turns"], shown["sequences"], shown["recorded"][0]["reward"]) == (2, 1, 0.25)


def test_a_reward_without_a_turn_is_answered_with_the_cause():
    """Its episode is FAILED."""
    with Endpoint(Scripted()) as endpoint:
        post(endpoint, "/s/t", {}, "PUT")
        ended = post(endpoint, "/s/t/reward", {"reward": 1.0}).json()

    assert (ended["done"], ended["error"].startswith("the session ended without a turn")) == (True, True)


@pytest.mark.parametrize(
    ("continues", "choice", "rewards"),
    [
        ((), 1, [None, 0.5]),
        ((1,), None, [None, 0.5]),
        ((1,), 0, [0.5, None]),
        ((), None, 400),
        ((0, 1), None, 400),
        ((), 2, 400),
    ],
)
def test_a_reward_of_several_choices_is_of_the_named_or_the_continued_choice(
    continues, choice, rewards, endpoint, engine
):
    answers = iter(("first", "second", "x", "y"))
    engine.answer = lambda prompt: next(answers)
    session = endpoint.new_session(Task("choices"))
    first = ask(endpoint, f"/s/{session}/v1/chat/completions", n=2).json()
    for each in continues:
        ask(
            endpoint, f"/s/{session}/v1/chat/completions", [*ASKED, first["choices"][each]["message"], *ASKED]
        )

    given = post(endpoint, f"/s/{session}/reward", {"response": first["id"], "reward": 0.5, "choice": choice})

    recorded = [turn["reward"] for turn in endpoint.summary(session)["recorded"]]
    if rewards == 400:
        assert (given.status_code, given.json()["error"]["param"]) == (400, "choice")
        assert not any(recorded)
    else:
        assert recorded[:2] == rewards


def test_a_session_that_ended_opens_again_as_the_next_sample(tmp_path):
    for _ in range(2):  # in the same folder
        with Endpoint(Scripted(), record=tmp_path) as endpoint:
            for _ in range(2):
                ask(endpoint, "/s/t/v1/chat/completions")
                post(endpoint, "/s/t/reward", {"reward": 0.0})
    found = list(recorded(tmp_path))

    assert [(each.task.id, each.sample) for each in found] == [("t", sample) for sample in range(4)]
    assert len({each.seed for each in found}) == 4


def test_a_request_that_continues_an_ended_session_opens_no_sample(tmp_path):
    """A worked example in a fresh conversation may have the text of an earlier answer."""
    path, asks = "/s/t/v1/chat/completions", {"role": "user", "content": "And?"}
    with Endpoint(Scripted(), record=tmp_path) as endpoint:
        said = ask(endpoint, path).json()["choices"][0]["message"]
        post(endpoint, "/s/t/reward", {"reward": 1.0})
        state = post(endpoint, "/s/t/state", {"state": "hall"}, "PUT")
        late = ask(endpoint, path, [*ASKED, said, asks])
        fresh = ask(endpoint, path, [asks, said, *ASKED])
        post(endpoint, "/s/t/reward", {"reward": 1.0})

    assert [each.status_code for each in (state, late, fresh)] == [409, 409, 200]
    assert [each.json()["error"]["code"] for each in (state, late)] == ["session_ended"] * 2
    assert [each.sample for each in recorded(tmp_path)] == [0, 1]


def test_a_session_may_be_opened_for_a_task(tmp_path):
    with Endpoint(Scripted(), record=tmp_path) as endpoint:
        body = {"task": "guess/7", "sample": 3, "seed": 5, "kind": "guess", "data": {"number": 7}}
        assert post(endpoint, "/s/x", body, "PUT").json()["seed"] == 5
        assert post(endpoint, "/s/x", body, "PUT").status_code == 409
        ask(endpoint, "/s/x/v1/chat/completions")
        post(endpoint, "/s/x/reward", {"done": True, "success": True})

    (episode,) = recorded(tmp_path)
    assert (episode.key, episode.seed, episode.task.data) == (("guess/7", 3), 5, {"number": 7})
    assert episode.success


def test_two_agents_on_one_session_are_counted(endpoint, engine):
    numbers = iter(range(9))
    engine.answer = lambda prompt: f"answer {next(numbers)}"
    path = "/s/shared/v1/chat/completions"

    def agents():
        return endpoint.summary("shared")["agents"]

    first, again = ask(endpoint, path), ask(endpoint, path)  # a retry, or another agent
    assert agents() == 1
    for said in (first, again):  # both go on: two agents
        ask(
            endpoint,
            path,
            [*ASKED, {"role": "assistant", "content": text(said)}, {"role": "user", "content": "x"}],
        )

    assert agents() == 2
    assert endpoint.summary("shared")["sequences"] == 2


def test_requests_at_the_same_time_have_conversations_of_their_own(endpoint, engine):
    held = threading.Event()
    engine.answer = lambda prompt: "ok" if held.is_set() else None
    asking = [threading.Thread(target=ask, args=(endpoint, "/s/both/v1/chat/completions")) for _ in range(2)]
    for each in asking:
        each.start()
    while len(engine.asked) < 2:
        time.sleep(0.005)
    held.set()
    for each in asking:
        each.join()

    assert len({prompt.conversation for prompt in engine.asked}) == 2
    assert len({prompt.seed for prompt in engine.asked}) == 2
    assert endpoint.summary("both")["turns"] == 2


def test_a_client_that_leaves_frees_its_slot(endpoint, engine, client):
    engine.answer = lambda prompt: None
    before = endpoint.counts().get("cancelled", 0)
    with pytest.raises(openai.APITimeoutError):
        client("left", timeout=0.5).chat.completions.create(model="p", messages=ASKED)
    body, key = {"model": "p", "messages": ASKED, "stream": True}, {"x-api-key": endpoint.key}
    with httpx.stream("POST", f"{endpoint.url('left')}/chat/completions", json=body, headers=key) as stream:
        assert next(stream.iter_text()).startswith(": waiting")  # and then it leaves
    until = time.monotonic() + 60
    while len(engine.cancelled) < 2 and time.monotonic() < until:
        time.sleep(0.01)

    assert engine.cancelled == [prompt.conversation for prompt in engine.asked]
    assert endpoint.counts()["in_flight"] == 0
    assert endpoint.counts()["cancelled"] >= before + 1
    engine.answer = lambda prompt: "ok"
    assert (
        client("left").chat.completions.create(model="p", messages=ASKED).choices[0].message.content == "ok"
    )
    assert len({prompt.seed for prompt in engine.asked}) == 1  # nothing was recorded before


def be_idle(endpoint, *names):
    """Let sessions have been idle for long, all from the same moment."""
    sessions = endpoint._sessions._sessions
    endpoint._run(lambda: [setattr(sessions[name], "touched", -100.0) for name in names])


def test_a_session_that_never_ends_is_cut_and_counted(tmp_path):
    limits = ServeSettings(idle_seconds=60, max_turns=2)
    with Endpoint(Scripted(), limits, record=tmp_path) as endpoint:
        for _ in range(2):
            ask(endpoint, "/s/long/v1/chat/completions")
        over = ask(endpoint, "/s/long/v1/chat/completions")
        ask(endpoint, "/s/idle/v1/chat/completions")
        be_idle(endpoint, "idle")
        until = time.monotonic() + 60
        while endpoint.counts().get("cut", 0) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        late = ask(endpoint, "/s/idle/v1/chat/completions")

    assert (over.status_code, late.status_code) == (409, 409)
    assert "idle" in late.json()["error"]["message"]
    found = {each.task.id: each for each in recorded(tmp_path)}
    assert (len(found["long"].turns), len(found["idle"].turns)) == (2, 1)
    assert all(each.truncated and not each.terminated for each in found.values())


def test_sessions_that_are_open_when_the_endpoint_ends_are_marked(tmp_path):
    with Endpoint(Scripted(), record=tmp_path) as endpoint:
        ask(endpoint, "/s/open/v1/chat/completions")

    (episode,) = recorded(tmp_path)
    assert (episode.status, episode.error, len(episode.turns)) == (Status.FAILED, LOST, 1)


def test_a_session_that_a_kill_lost_is_of_the_group_of_its_policy(tmp_path):
    """A copy of the folder is what a kill leaves."""
    with Endpoint(Scripted(), record=tmp_path / "open") as endpoint:
        ask(endpoint, "/s/t/v1/chat/completions")
        shutil.copytree(tmp_path / "open", tmp_path / "killed")
    Record(tmp_path / "killed", "agent").close()

    (episode,) = recorded(tmp_path / "killed")
    assert (episode.error, episode.policy) == (LOST, "scripted")


def test_a_session_in_this_process_is_handed_out_once(endpoint, engine):
    session = endpoint.new_session(Task("own"), 2, 9, sampling=Sampling(0.3, 0.9, 7))
    ask(endpoint, f"/s/{session}/v1/chat/completions", temperature=1.5)

    assert endpoint.trajectory(session).status is Status.UNFINISHED
    episode = endpoint.end_session(session, error="the agent died")

    assert engine.samplings == [Sampling(0.3, 0.9, 7)]
    assert (episode.status, episode.error, episode.key) == (Status.FAILED, "the agent died", ("own", 2))
    assert ask(endpoint, f"/s/{session}/v1/chat/completions").status_code == 409
    with pytest.raises(RunError, match="has ended"):
        endpoint.end_session(session)


def test_keys_are_in_no_file(tmp_path):
    with Endpoint(Scripted(lambda prompt: action("a")), key="very-secret-key", record=tmp_path) as endpoint:
        ask(endpoint, "/s/t/v1/chat/completions", user="someone")
        post(endpoint, "/s/t/reward", {"reward": 1})

    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"very-secret-key" not in written
    assert json.loads(written.splitlines()[0])


def test_idle_sessions_are_cut_although_a_reward_takes_long():
    judged = threading.Event()
    judge = lambda trajectory: float(judged.wait(60))  # noqa: E731
    with Endpoint(Scripted(), ServeSettings(idle_seconds=60), reward=judge) as endpoint:
        for name in "ab":
            ask(endpoint, f"/s/{name}/v1/chat/completions")
        be_idle(endpoint, "a", "b")
        until = time.monotonic() + 20
        while endpoint.counts()["open"] and time.monotonic() < until:
            time.sleep(0.01)
        assert endpoint.counts()["open"] == 0
        judged.set()
        while endpoint.counts().get("cut", 0) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert endpoint.counts()["cut"] == 2


def test_a_reward_whose_body_comes_late_finds_no_session(tmp_path):
    with Endpoint(Scripted(), record=tmp_path) as endpoint:
        ask(endpoint, "/s/a/v1/chat/completions")
        host, port = endpoint.address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as late:
            key = f"Authorization: Bearer {endpoint.key}"
            late.sendall(
                f"POST /s/a/reward HTTP/1.1\r\nHost: x\r\n{key}\r\nContent-Length: 13\r\n\r\n".encode()
            )
            time.sleep(0.2)
            assert post(endpoint, "/s/a/reward", {"reward": 1.0}).status_code == 200
            ask(endpoint, "/s/a/v1/chat/completions")  # another sample
            assert post(endpoint, "/s/a/reward", {"reward": 0.5}).status_code == 200
            late.sendall(b'{"reward": 9}')
            assert b" 409 " in late.recv(1000)

    assert [each.total_reward for each in recorded(tmp_path)] == [1.0, 0.5]


def test_no_two_sessions_have_one_sample(tmp_path):
    with Endpoint(Scripted(), record=tmp_path) as endpoint:
        named = {"task": "t", "sample": 1}
        assert post(endpoint, "/s/x", named, "PUT").status_code == 200
        assert post(endpoint, "/s/y", named, "PUT").status_code == 409
        found = [post(endpoint, f"/s/{name}", {"task": "t"}, "PUT").json()["sample"] for name in "zv"]
        for name in "xzv":
            assert post(endpoint, f"/s/{name}/reward", {"done": True}).status_code == 200

    assert found == [2, 3]


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("content", ["a", "", "<think>b</think> c", " \n"])
def test_a_text_alone_is_read_as_any_message(role, content):
    """Messages of text alone take a shorter way, which leads to the same messages."""
    others = [{"role": "tool", "content": "t", "tool_call_id": "x"}]
    said = [{"role": role, "content": content}]

    assert read_conversation(said) == read_conversation([*said, *others])[:1]


def test_a_client_that_leaves_while_its_session_is_cut_loses_no_episode(tmp_path):
    """The session is judged while its agent, whose request reached max_turns, hangs up."""
    asked, go = threading.Event(), threading.Event()

    def judge(trajectory):
        asked.set()
        go.wait(20)
        return 1.0

    with Endpoint(Scripted(), ServeSettings(max_turns=1), record=tmp_path, reward=judge) as endpoint:
        ask(endpoint, "/s/a/v1/chat/completions")
        host, port = endpoint.address.removeprefix("http://").split(":")
        body = json.dumps({"model": "p", "messages": ASKED * 2}).encode()
        head = (
            f"POST /s/a/v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {endpoint.key}\r\n"
        )
        with socket.create_connection((host, int(port))) as agent:
            agent.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert asked.wait(20)
        time.sleep(0.2)
        go.set()
        until = time.monotonic() + 20
        while not endpoint.counts().get("cut") and time.monotonic() < until:
            time.sleep(0.01)
        (episode,) = recorded(tmp_path)

    assert (episode.truncated, episode.total_reward) == (True, 1.0)


def test_a_folder_of_a_run_is_not_recorded_in(tmp_path):
    RunPaths(tmp_path).recipe.write_text("name: x\n")

    with pytest.raises(RunError, match="folder of a run"):
        Endpoint(Scripted(), record=tmp_path)
