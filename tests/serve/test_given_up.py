"""A client that gives up its request at the moment of the answer, and the state key of its request."""

import json
import socket
import threading
import time

import pytest

from perturn.serve import Endpoint
from support.endpoint_calls import ASKED, ask, post
from support.scripted import Scripted


def send(endpoint, session, **more):
    """Send a request, and return its connection without waiting for the answer."""
    host, port = endpoint.address.removeprefix("http://").split(":")
    body = json.dumps({"model": "p", "messages": ASKED, **more})
    lines = (
        f"POST /s/{session}/v1/chat/completions HTTP/1.1",
        f"Host: {host}",
        f"Authorization: Bearer {endpoint.key}",
        f"Content-Length: {len(body)}",
    )
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall("\r\n".join((*lines, "", body)).encode())
    return connection


def await_asked(engine, number):
    """Wait until the engine has got a number of prompts."""
    until = time.monotonic() + 20
    while len(engine.asked) < number and time.monotonic() < until:
        time.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_arrives_with_the_end_of_its_connection_is_not_recorded(stream):
    """The event loop gets both at once. The state key goes to the request that is sent again."""
    go = threading.Event()
    engine = Scripted(lambda prompt: "ok" if go.is_set() else None)
    with Endpoint(engine) as endpoint:
        post(endpoint, "/s/a/state", {"state": "hall"}, "PUT")
        connection = send(endpoint, "a", stream=stream)
        await_asked(engine, 1)
        endpoint._run(lambda: (connection.close(), go.set(), time.sleep(0.1)))
        ask(endpoint, "/s/a/v1/chat/completions")
        summary = endpoint.summary("a")

    assert [turn["state"] for turn in summary["recorded"]] == ["hall"]


def test_a_state_key_belongs_to_the_next_request_that_begins():
    """The second state is set while the first request waits; the third request has none."""
    go = threading.Event()
    engine = Scripted(lambda prompt: "ok" if go.is_set() else None)
    with Endpoint(engine) as endpoint:
        connections = []
        for state in ("A", "B", None):
            post(endpoint, "/s/a/state", {"state": state}, "PUT")
            messages = [{"role": "user", "content": f"with {state}"}]
            connections.append(send(endpoint, "a", messages=messages))
            await_asked(engine, len(connections))
        go.set()
        for connection in connections:
            connection.recv(1)
            connection.close()
        turns = endpoint.trajectory("a").turns

    states = {turn.state_key: turn.observation[-1]["content"] for turn in turns}
    assert states == {"A": "with A", "B": "with B", None: "with None"}
