"""Requests that arrive in the same turn of the event loop: the application is called without a network between."""

import asyncio
import json
import threading

import pytest

from perturn.serve.agent_session import Session
from perturn.serve.app import make_app
from perturn.serve.exchange import Answer, Ask
from perturn.serve.request_parser import RequestParser
from perturn.serve.session_manager import SessionManager
from perturn.serve.settings import ServeSettings
from perturn.types import Action, Status, Task
from support.scripted import Scripted, action

CHAT = "v1/chat/completions"
USER = {"role": "user", "content": "u"}
TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("alpha", "beta")]


def served(engine, work, judge=None):
    """Return what `work(sessions, post)` returns, where `post` sends a request to the endpoint of an engine."""

    async def run():
        sessions = SessionManager(engine, ServeSettings(reward_seconds=30), None, judge, "agent", 0)
        sessions.start()
        app = make_app(sessions, "key")

        async def post(path, **body):
            """Return the status, the headers, and the body of a response."""
            sent, given = (
                [],
                [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}],
            )

            async def receive():
                return given.pop() if given else await asyncio.sleep(60)

            async def send(message):
                sent.append(message)

            whole = path if path.startswith("/") else f"/s/{path}"
            scope = {"type": "http", "method": "POST", "path": whole, "query_string": b""}
            await app(scope | {"headers": [(b"authorization", b"Bearer key")]}, receive, send)
            found = b"".join(message.get("body", b"") for message in sent[1:]).decode()
            return sent[0]["status"], dict(sent[0]["headers"]), found

        try:
            return await work(sessions, post)
        finally:
            await sessions.stop()

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_requests_of_a_session_get_answers_to_their_own_messages(stream):
    """A stream begins to answer after other requests were read."""
    engine = Scripted(lambda prompt: f"to {prompt.observation[-1]['content']}")

    async def work(sessions, post):
        asked = [
            post(f"s/{CHAT}", model="m", stream=stream, messages=[USER | {"content": word}]) for word in "ABC"
        ]
        answers = [body for _, _, body in await asyncio.gather(*asked)]
        return answers, sessions.so_far("s")

    answers, episode = served(engine, work)

    assert [f"to {word}" in answer for word, answer in zip("ABC", answers, strict=True)] == [True] * 3
    heard = {turn.observation[-1]["content"]: turn.action.text for turn in episode.turns}
    assert heard == {word: f"to {word}" for word in "ABC"}


def begin(session, word, seed=None):
    """Begin a request of a session; return its position and prompts."""
    ask = Ask([USER | {"content": word}], "m", seed=seed)
    session.parser.read(ask)
    position = session.position()
    return position, session.begin(position, ask)


def test_a_state_key_is_handed_back_only_if_no_other_request_began():
    """A wrong key is worse than none."""
    session = Session("s", Task("t"), 1)
    session.give_state("A")
    _, failed = begin(session, "a")
    session.end(failed)
    assert session.next_state == "A"

    (_, first), (_, again) = begin(session, "a"), begin(session, "a")
    session.end(first)
    session.end(again)
    assert session.next_state is None

    session.give_state("A")
    _, one = begin(session, "a")
    session.give_state("B")
    _, other = begin(session, "b")
    session.end(other)
    session.end(one)
    assert session.next_state is None


def test_no_two_turns_of_a_session_have_one_seed():
    """`a` fails while `b` is answered, so `c` finds seed 1 in use, and `d` seed 2. `e` brings its own seed."""
    session = Session("s", Task("t"), 1, seed=5)
    (_, a), (position, b) = begin(session, "a"), begin(session, "b")
    session.end(a)
    _, c = begin(session, "c")
    session.end(b)
    session.record("r", position, b, [Answer(Action("x"), "x", (), None)])
    _, d = begin(session, "d")
    begin(session, "e", seed=7)
    _, f = begin(session, "f")

    assert [prompt.seed - 5 * 1_000_003 for prompt in (*a, *b, *c, *d, *f)] == [0, 1, 2, 3, 4]


def test_the_conversation_of_a_new_session_is_digested_once(monkeypatch):
    digested, position = [], RequestParser.position
    monkeypatch.setattr(
        RequestParser, "position", lambda self, sequences: (digested.append(1), position(self, sequences))[1]
    )

    assert (
        served(Scripted(), lambda sessions, post: post(f"new/{CHAT}", model="m", messages=[USER]))[0] == 200
    )
    assert len(digested) == 1


def test_an_agent_that_waits_gets_its_reward_before_sessions_that_were_cut():
    """Three sessions are cut at once; `a` is being judged when the agent asks."""
    order, go = [], threading.Event()

    def judge(episode):
        order.append(episode.task.id)
        go.wait(20)
        return 1.0

    async def work(sessions, post):
        for name in ("a", "b", "c", "agent"):
            await post(f"{name}/{CHAT}", model="m", messages=[USER])
        for name in "abc":
            sessions.known(name).touched = -1e9
        sessions.expire()
        await asyncio.sleep(0.01)
        ending = asyncio.ensure_future(post("agent/reward", done=True))
        while sessions.summary()["open"]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        go.set()
        await ending
        while sessions.counts["cut"] < 3:
            await asyncio.sleep(0.01)

    served(Scripted(), work, judge)

    assert order == ["a", "agent", "b", "c"]


@pytest.mark.parametrize("judge", [None, lambda episode: 1.0])
def test_a_caller_that_ends_a_session_while_its_agent_does_gets_its_episode(judge):
    """The agent's reward is being handled when the caller ends the session, such as at a time limit."""

    async def work(sessions, post):
        sessions.open("kept", Task("t"), 0, 0, is_kept=True)
        await post(f"kept/{CHAT}", model="m", messages=[USER])
        return await asyncio.gather(
            post("kept/reward", reward=1.0), sessions.collect("kept", None, None, None, truncated=False)
        )

    (status, _, _), episode = served(Scripted(), work, judge)

    assert status == 200
    assert (episode.total_reward, episode.success, len(episode.turns)) == (1.0, True, 1)


def test_a_client_is_told_not_to_repeat_a_request_of_a_session_that_has_ended():
    """OpenAI's and Anthropic's clients repeat a 409, and would open the next sample of the task."""
    waits = Scripted(lambda prompt: None)

    async def work(sessions, post):
        asked = asyncio.ensure_future(post(f"z/{CHAT}", model="m", messages=[USER]))
        while not waits.asked:
            await asyncio.sleep(0.001)
        ended = await post("z/reward", reward=1.0)
        return await asked, ended

    (status, headers, body), ended = served(waits, work)

    assert ended[0] == 200
    assert (status, json.loads(body)["error"]["code"]) == (409, "session_ended")
    assert headers[b"x-should-retry"] == b"false"


def test_results_after_an_earlier_response_belong_to_the_calls_that_they_name():
    """They may come in any order; the policy reads them in the order of its calls."""
    calls = tuple({"type": "function", "function": {"name": tool["name"], "arguments": {}}} for tool in TOOLS)
    engine = Scripted(lambda prompt: action("", tool_calls=calls) if not prompt.turns else "done")

    async def work(sessions, post):
        _, _, first = await post("r/v1/responses", model="m", input="go", tools=TOOLS)
        ids = {item["name"]: item["call_id"] for item in json.loads(first)["output"]}
        results = [
            {"type": "function_call_output", "call_id": ids[name], "output": f"of {name}"}
            for name in ("beta", "alpha")
        ]
        before = json.loads(first)["id"]
        return await post(
            "r/v1/responses", model="m", tools=TOOLS, previous_response_id=before, input=results
        )

    assert served(engine, work)[0] == 200
    heard = [(message["name"], message["content"]) for message in engine.asked[1].observation]
    assert heard == [("alpha", "of alpha"), ("beta", "of beta")]


def test_a_stop_text_in_a_tool_call_ends_the_answer():
    """The call is taken out of the text; the answer is not cut."""
    wrote = '<tool_call>\n{"name": "alpha", "arguments": {}}\n</tool_call>'
    engine = Scripted(lambda prompt: action(wrote, ended=False))
    tools = [{"type": "function", "function": {"name": "alpha", "parameters": {"type": "object"}}}]

    async def work(sessions, post):
        given = {"tools": tools, "stop": ["</tool_call>"]}
        return json.loads((await post(f"q/{CHAT}", model="m", messages=[USER], **given))[2])["choices"][0]

    choice = served(engine, work)

    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "alpha"


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_session_without_a_turn_is_no_success(is_kept):
    """No turn can have its reward. Without a caller who checks it, it fails."""

    async def work(sessions, post):
        session = sessions.open("empty", Task("t"), 0, 0, is_kept=is_kept)
        if is_kept:
            return await sessions.collect("empty", 1.0, None, None, truncated=False)
        session.give_reward(1.0)
        return await sessions.finish(session, "ended")

    episode = served(Scripted(), work)

    assert (episode.success, episode.total_reward) == (False, 0)
    assert (episode.status is Status.FAILED) != is_kept
    assert is_kept or "ended without a turn" in episode.error


@pytest.mark.parametrize("error", [asyncio.CancelledError("mine"), KeyboardInterrupt("mine")])
def test_a_reward_function_may_raise_anything(error):
    """Its episode fails at once; a cancellation is not the endpoint's own."""

    def judge(episode):
        raise error

    async def work(sessions, post):
        sessions.open("judged", Task("t"), 0, 0, is_kept=True)
        await post(f"judged/{CHAT}", model="m", messages=[USER])
        return await asyncio.wait_for(sessions.collect("judged", None, None, None, truncated=False), 20)

    episode = served(Scripted(), work, judge)

    assert episode.status is Status.FAILED
    assert f"the reward function failed: it raised {type(error).__name__}: mine" in episode.error


def test_unnamed_streams_of_the_same_moment_keep_their_sessions():
    """Both sessions have the same conversation; the second request finds the first session in use."""

    async def work(sessions, post):
        async def both(messages):
            asked = [post(f"/{CHAT}", model="m", stream=True, messages=messages) for _ in range(2)]
            return {headers[b"x-perturn-session"] for _, headers, _ in await asyncio.gather(*asked)}

        return await both([USER]), await both([USER, {"role": "assistant", "content": "ok"}, USER])

    opened, continued = served(Scripted(), work)

    assert len(opened) == 2
    assert continued == opened
