"""Client for text environments on OpenEnv servers. Each environment object holds one WebSocket session.

`pip install "perturn[openenv]"` installs only `websockets`. The messages follow `openenv` 0.10. OpenEnv's own client is
not used, since it requires forty packages, some in versions that conflict with training. The server may run on any
machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

from perturn.envs.adapter_values import as_number, as_text, check_seeds, seed_tasks, task_seed
from perturn.errors import EnvironmentFailure, WorldLost, check_fit
from perturn.io.read_input import parse_json
from perturn.table import require_library
from perturn.traits import EnvironmentTraits
from perturn.types import Observation, Task

_HINT = "start the server, or correct environment.base_url"


class OpenEnv:
    """A text environment of an OpenEnv server. A task is a seed.

    The policy's action is sent in the field `action_field` of the server's action. The policy reads the field
    `text_field` of the server's observation. `done` ends the episode. If the observation or the metadata has the field
    `success`, that field decides whether the episode is solved. Otherwise a positive last reward counts as success.
    """

    traits: ClassVar[EnvironmentTraits] = EnvironmentTraits(in_process=True)

    def __init__(
        self,
        base_url: str,
        action_field: str,
        text_field: str,
        seeds: Mapping[str, int] | None = None,
        name: str = "openenv",
        timeout: float = 60.0,
    ) -> None:
        """Check the settings; the session begins with the first episode.

        Args:
            base_url: Address of the server, such as `http://localhost:8000`.
            action_field: Field of the server's action that holds the text, such as `message`.
            text_field: Field of the server's observation that is shown to the policy.
            seeds: Number of tasks of each split; seeds count up from 0 across the splits. None: 200 train, 100 test.
            name: Name and version of the environment, recorded in every trajectory.
            timeout: Time limit of each answer of the server, in seconds.
        """
        require_library("websockets", "openenv", "openenv")
        self._seeds = check_seeds(seeds)
        self._url = _websocket(base_url)
        self._action_field, self._text_field = action_field, text_field
        self._timeout = timeout
        self._session = ExitStack()
        self._socket: Any = None
        self.name = name

    def tasks(self, split: str) -> Sequence[Task]:
        """Return one task per seed of the split."""
        return seed_tasks(self._seeds, split)

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start the episode of the task's seed; the argument `seed` is ignored."""
        if self._socket is None:
            self._connect()
        posed = self._seen(self._ask("reset", {"seed": task_seed(task), "episode_id": task.id}))
        return Observation(posed.text, terminated=posed.terminated)

    def step(self, action: str) -> Observation:
        """Take one action."""
        if self._socket is None:
            raise EnvironmentFailure("no episode is running: call reset before step.")
        return self._seen(self._ask("step", {self._action_field: action}))

    def close(self) -> None:
        """End the session."""
        self._socket = None
        self._session.close()

    def _connect(self) -> None:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        try:
            session = connect(self._url, open_timeout=self._timeout, max_size=100 * 2**20)
            self._socket = self._session.enter_context(session)
        except (OSError, WebSocketException) as error:
            raise EnvironmentFailure(
                f"no OpenEnv server answers at {self._url}: {error}; {_HINT}."
            ) from error

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the server's answer to a message."""
        from websockets.exceptions import WebSocketException

        try:
            self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = parse_json(self._socket.recv(timeout=self._timeout), self._url, EnvironmentFailure)
        except (OSError, WebSocketException, EnvironmentFailure, ValueError) as error:
            self.close()
            said = str(error) or type(error).__name__
            raise WorldLost(f"the session with {self._url} was lost in {kind}: {said}; {_HINT}.") from error
        body = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(body, dict) or answer.get("type") == "error":
            said = body.get("message", body) if isinstance(body, dict) else answer
            raise EnvironmentFailure(f"{self._url} refused {kind}: {said!s:.300}")
        return body

    def _seen(self, body: Mapping[str, Any]) -> Observation:
        fields = body.get("observation")
        if not isinstance(fields, Mapping) or self._text_field not in fields:
            known = ", ".join(sorted(fields)) if isinstance(fields, Mapping) else repr(fields)
            raise EnvironmentFailure(
                f"the observation of {self.name} has no field {self._text_field!r}; it has {known}. Set "
                "environment.text_field to the one the policy shall read."
            )
        reward, done = as_number(body.get("reward"), "the reward"), bool(body.get("done"))
        metadata = body.get("metadata")
        said = {**(metadata if isinstance(metadata, Mapping) else {}), **fields}
        success = said.get("success")
        text = as_text(fields[self._text_field], f"observation.{self._text_field}")
        solved = done and reward > 0 if success is None else bool(success)
        return Observation(text, reward=reward, terminated=done, success=solved)


def _websocket(url: str) -> str:
    """Return the WebSocket address of a server's sessions."""
    scheme, mark, rest = url.partition("://")
    fits = mark and scheme in ("http", "https", "ws", "wss")
    check_fit(fits, "base_url", "begin with http://, https://, ws:// or wss://", url)
    return f"{scheme.replace('http', 'ws')}://{rest.rstrip('/').removesuffix('/ws')}/ws"
