"""Calls of an endpoint, and the episodes that it recorded."""

import httpx2 as httpx

from perturn.data.run_paths import RunPaths
from perturn.data.store import read_trajectories

ASKED = [{"role": "user", "content": "Where?"}]


def recorded(folder):
    """Return the recorded episodes in an endpoint's folder."""
    return read_trajectories(RunPaths(folder).trajectories("explore"))


def post(endpoint, path, body, method="POST", **headers):
    """Send JSON with the endpoint's key."""
    headers = {"Authorization": f"Bearer {endpoint.key}"} | headers
    return httpx.request(method, f"{endpoint.address}{path}", json=body, headers=headers, timeout=20)


def ask(endpoint, path="/v1/chat/completions", messages=ASKED, **more):
    """Request a chat completion, and return the response."""
    return post(endpoint, path, {"model": "p", "messages": messages, **more})


def text(response):
    return response.json()["choices"][0]["message"]["content"]
