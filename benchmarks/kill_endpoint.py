"""Kill `perturn serve --record` while a client plays sessions, as a part of `benchmarks/kills.py`."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from perturn.data.run_paths import RunPaths
from perturn.data.store import read_trajectories
from perturn.types import Status

NAME, SESSIONS, KEY = "perturn serve --record", 12, "key-of-the-kills"
_STARTING = 120.0
"""Time in which a restarted server must answer, in seconds."""


class Client:
    """Client that plays sessions of two turns one after the other. It repeats a session until its end is confirmed."""

    def __init__(self, address: str) -> None:
        """Start playing in a thread."""
        self._address, self.ended, self.sent = address, threading.Event(), Counter[str]()
        self.error = ""
        threading.Thread(target=self._play, daemon=True).start()

    def _play(self) -> None:
        for number in range(SESSIONS):
            until = time.monotonic() + _STARTING
            while not self._session(f"s{number}", float(number % 2)):
                if time.monotonic() > until:
                    self.error = f"session {number} cannot be played"
                    self.ended.set()
                    return
                time.sleep(0.2)
        self.ended.set()

    def _session(self, name: str, reward: float) -> bool:
        """Play a whole session. Return whether its end was confirmed."""
        said = [{"role": "user", "content": f"Task {name} : say door 1"}]
        try:
            for _ in range(2):
                answer = self._ask(
                    f"{name}/v1/chat/completions", {"model": "p", "messages": said, "max_tokens": 3}
                )
                said += [answer["choices"][0]["message"], {"role": "user", "content": "Go on"}]
                time.sleep(0.1)
            self.sent[name] += 1
            self._ask(f"{name}/reward", {"reward": reward})
        except (OSError, ValueError):  # the server is gone, so the session starts again
            return False
        return True

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._address}/s/{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"{}")


def trial(start: Callable[[], Any], url: str, record: Path, draw: Random, kills: int) -> dict[str, Any]:
    """Kill the server repeatedly while a client plays. Return the kills, the commands, and any errors at the end."""
    server, client = start(), Client(url)
    found: list[dict[str, Any]] = []
    commands, began, problems = 1, time.monotonic(), list[str]()
    while not client.ended.wait(draw.uniform(0, 2) if len(found) < kills and _answers(url) else 0.2):
        if len(found) < kills and _answers(url):
            server.driver.kill()
            found.append({"role": "endpoint", "stage": "serve", "after": round(time.monotonic() - began, 2)})
        if server.wait(0) is not None:
            if left := server.orphans():
                problems.append(f"processes are left: {left}")
            server, commands, began = start(), commands + 1, time.monotonic()
    server.driver.terminate()
    if server.wait(60) is None:
        server.driver.kill()
        problems.append("the endpoint does not end at SIGTERM")
    problems += [client.error] if client.error else []
    return {"kills": found, "commands": commands, "problems": problems + _wrong(record, client.sent)}


def _answers(url: str) -> bool:
    """Return whether a server listens."""
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) == 0


def _wrong(record: Path, sent: Counter[str]) -> list[str]:
    """Return sessions whose confirmed end is missing, that have too many ends, or that have a wrong reward."""
    whole = [
        one
        for one in read_trajectories(RunPaths(record).trajectories("explore"))
        if one.status is Status.COMPLETED
    ]
    found = Counter(one.task.id for one in whole)
    problems = [f"session {name} has no episode" for name in sent if not found[name]]
    problems += [f"session {name} has {found[name]} episodes" for name in found if found[name] > sent[name]]
    odd = [one for one in whole if one.total_reward != float(int(one.task.id[1:]) % 2) or len(one.turns) != 2]
    return problems + [f"session {one.task.id} has another episode" for one in odd]
