"""Malformed requests get the error objects of their protocol, and change nothing."""

import inspect
import json
import socket
import time

import httpx2 as httpx
import pytest
from transformers import PreTrainedTokenizerBase

from perturn.errors import ConfigError, ContextFull, EngineFailure, ModelError
from perturn.serve import Endpoint, ServeSettings
from perturn.serve.protocols.common import RESERVED
from perturn.types import Status
from support.endpoint_calls import recorded
from support.scripted import Scripted, action

CHAT, ANTHROPIC, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SAID = [{"role": "user", "content": "a"}]
GOOD = {"model": "p", "messages": SAID}
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]


def send(endpoint, path, body, **headers):
    """Send a body, JSON data or bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Authorization": f"Bearer {endpoint.key}", "Content-Type": "application/json"} | headers
    return httpx.post(f"{endpoint.address}{path}", content=content, headers=given, timeout=20)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"\xff\xfe", None),
        (b"[" * 100_000, None),
        ([], None),
        ({"model": "p"}, "messages"),
        ({"model": "p", "messages": []}, "messages"),
        ({"model": "p", "messages": "hello"}, "messages"),
        ({"model": "p", "messages": IMAGE}, "messages"),
        ({"model": "p", "messages": [{"content": "a"}]}, "messages"),
        ({"model": "p", "messages": [{"role": "wizard", "content": "a"}]}, "messages"),
        ({"model": "p", "messages": [{"role": "user", "content": "\ud800"}]}, None),
        (GOOD | {"temperature": 9}, "temperature"),
        (GOOD | {"temperature": "hot"}, "temperature"),
        (GOOD | {"top_p": 0}, "top_p"),
        (GOOD | {"max_tokens": 0}, "max_tokens"),
        (GOOD | {"n": 99}, "n"),
        (GOOD | {"n": 10**6}, "n"),
        (GOOD | {"seed": 2**70}, "seed"),
        (GOOD | {"tools": [{"type": "web_search"}]}, "tools[0]"),
        (GOOD | {"frequency_penalty": 0.5}, "frequency_penalty"),
        (GOOD | {"top_logprobs": 3}, "top_logprobs"),
        (GOOD | {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        (GOOD | {"response_format": {"type": "poem"}}, "response_format"),
        (GOOD | {"chat_template_kwargs": {"x": float("nan")}}, "chat_template_kwargs"),
        (GOOD | {"chat_template_kwargs": {"x": 10**400}}, "chat_template_kwargs"),
        (GOOD | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (GOOD | {"chat_template_kwargs": {"x": 1, "tokenize": True}}, "chat_template_kwargs"),
        (GOOD | {"tools": [{"type": "function", "function": {"name": {"a": 1}}}]}, "tools[0]"),
    ],
)
def test_openai_errors_name_their_parameter(endpoint, engine, body, param):
    before = endpoint.counts().get("opened")
    found = send(endpoint, f"/s/bad{CHAT}", body)

    assert found.status_code == 400
    error = found.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert error["param"] == param
    assert engine.asked == []
    assert endpoint.counts().get("opened") == before


@pytest.mark.parametrize(
    "body",
    [
        {"model": "p", "messages": SAID},  # without max_tokens
        {"model": "p", "max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"model": "p", "max_tokens": 5, "messages": [*SAID, {"role": "assistant", "content": "I"}]},
        {"model": "p", "max_tokens": 5, "messages": SAID, "tools": [{"name": "x"}]},
        b"nonsense",
    ],
)
def test_anthropic_errors(endpoint, engine, body):
    found = send(endpoint, ANTHROPIC, body)

    assert found.status_code == 400
    assert found.json()["type"] == "error"
    assert found.json()["error"]["type"] == "invalid_request_error"
    assert engine.asked == []


def test_responses_errors(endpoint):
    for body in (
        {"model": "p"},
        {"model": "p", "input": []},
        {"model": "p", "input": [{"type": "computer_call"}]},
        {"model": "p", "input": "a", "tools": [{"type": "web_search"}]},
    ):
        assert send(endpoint, RESPONSES, body).json()["error"]["type"] == "invalid_request_error"
    unknown = send(endpoint, RESPONSES, {"model": "p", "input": "a", "previous_response_id": "resp_no"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "previous_response_id")


def test_a_wrong_key_and_an_unknown_path(endpoint):
    assert send(endpoint, CHAT, GOOD, Authorization="Bearer wrong").status_code == 401
    assert send(endpoint, ANTHROPIC, GOOD, Authorization="").json()["error"]["type"] == "authentication_error"
    assert send(endpoint, "/v1/embeddings", {}).status_code == 404
    assert send(endpoint, "/v1/embeddings", {}).json()["error"]["code"] == "not_found"
    assert send(endpoint, "/s/no/reward", {"reward": 1}).status_code == 404
    assert send(endpoint, f"/s/{'x' * 300}{CHAT}", GOOD).json()["error"]["code"] == "invalid_session"


def test_limits_of_bodies_sessions_and_time():
    limits = ServeSettings(max_body_bytes=1000, max_sessions=1, request_seconds=0.2)
    with Endpoint(Scripted(lambda prompt: None if len(prompt.observation) > 1 else "ok"), limits) as endpoint:
        large = send(endpoint, CHAT, GOOD | {"user": "x" * 2000})
        assert send(endpoint, f"/s/a{CHAT}", GOOD).status_code == 200
        more = send(endpoint, f"/s/b{CHAT}", GOOD)
        slow = send(endpoint, f"/s/a{CHAT}", GOOD | {"messages": SAID * 2})

    assert (large.status_code, more.status_code, slow.status_code) == (413, 429, 504)
    assert more.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (ContextFull("no room"), 400, "context_length_exceeded"),
        (EngineFailure("broken"), 500, "engine_failure"),
        (ModelError("a template that cannot"), 503, "engine_unavailable"),
        (action("x").__class__("x", (1,), (float("nan"),)), 500, "engine_failure"),
    ],
)
def test_what_an_engine_cannot_answer(endpoint, engine, failure, status, code):
    engine.answer = lambda prompt: failure

    found = send(endpoint, f"/s/fails{CHAT}", GOOD)
    stream = send(endpoint, f"/s/fails{CHAT}", GOOD | {"stream": True})

    assert (found.status_code, found.json()["error"]["code"]) == (status, code)
    assert stream.status_code == status
    assert endpoint.summary("fails")["turns"] == 0


def test_an_anthropic_client_reads_that_the_context_is_full(endpoint, engine):
    """Claude Code compacts its conversation when it reads these words."""
    engine.answer = lambda prompt: ContextFull("no room")

    error = send(endpoint, ANTHROPIC, GOOD | {"max_tokens": 5}).json()["error"]

    assert (error["message"], error["code"]) == ("prompt is too long: no room", "context_length_exceeded")


def test_what_cut_a_session_is_recorded(tmp_path):
    """A full context, after an answer or before the first; max_turns, also after a request that was too long."""
    limits = ServeSettings(max_turns=2, idle_seconds=60)
    engine = Scripted(lambda prompt: ContextFull("no room") if len(prompt.turns) else "ok")
    with Endpoint(engine, limits, record=tmp_path) as endpoint:
        for name in ("full", "turns"):
            assert send(endpoint, f"/s/{name}{CHAT}", GOOD).status_code == 200
            more = GOOD | {"messages": [*SAID, {"role": "assistant", "content": "ok"}, *SAID]}
            assert send(endpoint, f"/s/{name}{CHAT}", more).status_code == 400
        assert send(endpoint, f"/s/turns{CHAT}", more | {"n": 2}).status_code == 409
        engine.answer = lambda prompt: ContextFull("no room")
        assert send(endpoint, f"/s/first{CHAT}", GOOD).status_code == 400
        sessions = endpoint._sessions._sessions
        endpoint._run(lambda: [setattr(each, "touched", -100.0) for each in sessions.values()])
        until = time.monotonic() + 60
        while [endpoint.counts().get(key, 0) for key in ("cut", "failed")] != [2, 1]:
            assert time.monotonic() < until, endpoint.counts()
            time.sleep(0.02)

    found = {each.task.id: (each.status, each.error) for each in recorded(tmp_path)}
    assert found == {
        "full": (Status.COMPLETED, "ContextFull: no room"),
        "turns": (Status.COMPLETED, None),
        "first": (Status.FAILED, "ContextFull: no room"),
    }


def test_an_engine_that_raises_fails_its_requests_alone(endpoint, engine):
    def broken(prompt):
        raise ZeroDivisionError("inside")

    engine.answer = broken
    found = send(endpoint, CHAT, GOOD)
    engine.answer = lambda prompt: "ok"

    assert "ZeroDivisionError" in found.json()["error"]["message"]
    assert send(endpoint, CHAT, GOOD).status_code == 200


def test_an_address_of_others_needs_a_key_of_ones_own():
    with pytest.raises(ConfigError, match="PERTURN_API_KEY"):
        Endpoint(Scripted(), ServeSettings(host="0.0.0.0"))
    with pytest.raises(ConfigError, match="letters"):
        Endpoint(Scripted(), key="a.b c")
    with (
        Endpoint(Scripted()) as endpoint,
        pytest.raises(ConfigError, match="cannot be listened at"),
    ):
        Endpoint(Scripted(), ServeSettings(port=int(endpoint.address.rpartition(":")[2])))


@pytest.mark.parametrize("name", ["%E6%97%A5", "a" * 300, "a%00b", "..%2f..%2fx"])
def test_a_strange_name_opens_no_session(endpoint, engine, name):
    found = send(endpoint, f"/s/{name}{CHAT}", GOOD)

    assert found.status_code in (400, 404)
    assert found.json()["error"]["type"] == "invalid_request_error"
    assert engine.asked == []


def test_what_no_record_can_hold_is_refused_when_a_session_opens(endpoint):
    found = httpx.put(
        f"{endpoint.address}/s/odd",
        content=b'{"data": {"x": NaN}}',
        headers={"Authorization": f"Bearer {endpoint.key}"},
    )

    assert (found.status_code, found.json()["error"]["param"]) == (400, "data")


@pytest.mark.parametrize("more", [{}, {"stream": True}])
def test_an_unforeseen_error_has_the_form_of_the_protocol(endpoint, monkeypatch, caplog, more):
    def broken(*_):
        raise ZeroDivisionError("inside")

    monkeypatch.setattr("perturn.serve.session_manager.read_action", broken)
    found = send(endpoint, CHAT, GOOD | more)

    assert (found.status_code, found.json()["error"]["code"]) == (500, "internal_error")
    assert "ZeroDivisionError" in caplog.text


def test_a_body_that_trickles_in_is_given_up():
    with Endpoint(Scripted(), ServeSettings(body_seconds=0.2)) as endpoint:
        host, port = endpoint.address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            key = f"Authorization: Bearer {endpoint.key}"
            connection.sendall(
                f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{key}\r\nContent-Length: 9\r\n\r\n{{".encode()
            )
            assert b" 408 " in connection.recv(1000)


def test_template_variables_that_are_known_stay_welcome(endpoint):
    found = [send(endpoint, CHAT, GOOD | {"chat_template_kwargs": {"x": x}}) for x in (*range(70), 0)]

    assert [found[0].status_code, found[-2].status_code, found[-1].status_code] == [200, 400, 200]


def test_every_argument_of_the_function_that_writes_a_conversation_is_reserved():
    arguments = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"kwargs"}

    assert arguments <= RESERVED


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"reward": "1.5"}, "reward"),
        ({"reward": True}, "reward"),
        ({"reward": 1e999}, "reward"),
        ({"reward": [1]}, "reward"),
        ({"success": "yes"}, "success"),
        ({"done": 1}, "done"),
    ],
)
def test_a_reward_is_a_number(endpoint, body, param):
    send(endpoint, f"/s/rewarded{CHAT}", GOOD)
    found = send(endpoint, "/s/rewarded/reward", body)

    assert (found.status_code, found.json()["error"]["param"]) == (400, param)
    assert endpoint.summary("rewarded")["reward"] is None
