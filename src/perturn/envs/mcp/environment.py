"""Environment `mcp`: tasks from a file, which are solved with the tools of MCP servers.

The environment needs `pip install "perturn[mcp]"`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, ClassVar, NotRequired

from typing_extensions import TypedDict

from perturn.bounds import PATH, SECONDS, Bound
from perturn.config.parsing import parse
from perturn.envs.benchmark import NO_EPISODE, check_installed, check_known, short_hash
from perturn.envs.json_rows import read_rows
from perturn.envs.mcp.mcp_servers import McpServers, ServerSettings, no_tool
from perturn.envs.user_talk import UserTalk
from perturn.episodes.tool_calls import ToolAction, ToolCall, read_action, write_action
from perturn.errors import DataError, EnvironmentFailure, check_fit, did_you_mean
from perturn.errors import check_known as check_listed
from perturn.faults import plain_scalar
from perturn.io.read_input import check_shape, user_path
from perturn.io.user_code import load_object
from perturn.traits import EnvironmentTraits
from perturn.types import Observation, Task

_NO_ACTION = "That is not an action: call tools, or write your answer."
_GREETING = "Hi! How can I help you today?"
_CUT = "... (cut)"


class _Call(TypedDict):
    name: str
    arguments: NotRequired[dict[str, Any]]


class _Row(TypedDict):
    prompt: str
    id: NotRequired[str]
    kind: NotRequired[str]
    split: NotRequired[str]
    answer: NotRequired[str]
    actions: NotRequired[list[_Call]]
    user: NotRequired[str]


class Mcp:
    """Tasks of a file, solved with the tools of MCP servers; play it under `protocol.format=tools`.

    Each episode starts its own servers and ends them. A row of the file has the key `prompt`. Optional keys are `id`,
    `kind`, `split` (default `train`), `answer`, and `actions`, the list of calls that the expert plays. An action
    without calls is the final answer and ends the episode.

    If a row has the key `user`, with instructions for a simulated user, the episode is a conversation. An action
    without calls is then a message to the user, and the user ends the episode with `###STOP###`.

    The reward is the value of your own function. By default it is 1 if the answer equals the row's answer, ignoring
    case and spacing, else 0. A row without an answer always has reward 0; use `reward.judge` for such rows.
    """

    format: ClassVar[str] = "tools"
    traits: ClassVar[EnvironmentTraits] = EnvironmentTraits(distributions=("mcp",))

    def __init__(
        self,
        servers: list[dict[str, Any]],
        tasks: Annotated[str, PATH],
        reward: str | None = None,
        tools: list[str] | None = None,
        version: str = "",
        start_seconds: Annotated[float, SECONDS] = 30.0,
        call_seconds: Annotated[float, SECONDS] = 30.0,
        result_characters: Annotated[int, Bound(least=1)] = 20_000,
    ) -> None:
        """Read the tasks. Servers start with each episode.

        Args:
            servers: Settings of each server: `command`, and optionally `env`, `pass_env`, `cwd` and `tools`.
            tasks: File of rows.
            reward: Function that returns the reward of an episode, as `module:function` or `file.py:function`. Its
                arguments are the row, the answer, and the list of calls, each as `{name, arguments, result}`. The
                answer is the policy's last message without calls. None: compare the answer with the row's answer.
            tools: Names of the tools that are offered. None: all.
            version: Version of servers and tasks, recorded in every trajectory. Empty: a hash of the rows, the
                servers (without `cwd`), the tools and the name of the reward function.
            start_seconds: Time limit for starting a server, in seconds.
            call_seconds: Time limit of a call, in seconds. After it, the policy sees an error as the result.
            result_characters: Number of characters after which a result is cut.
        """
        check_installed("mcp", "mcp", ("mcp",))
        file = user_path(tasks, "environment.tasks")
        self._servers = [
            parse(ServerSettings, each, f"environment.servers[{number}]")
            for number, each in enumerate(servers)
        ]
        must = "name a server, such as [{command: [python, -m, my_server]}]"
        check_fit(self._servers, "environment.servers", must, servers)
        self._rows = _read(file)
        self._reward: Callable[..., Any] | None = None if reward is None else load_object(reward)
        self._tools = tools
        self._limits = {"start_seconds": start_seconds, "call_seconds": call_seconds}
        self._longest = result_characters
        # `cwd` differs between machines, and `env` may hold paths.
        started = [asdict(each) | {"env": sorted(each.env), "cwd": None} for each in self._servers]
        played = json.dumps([self._rows, started, tools, reward], sort_keys=True, default=str)
        self.name = f"mcp-{version or short_hash(played)[:8]}"
        self._open: McpServers | None = None
        self._row: Mapping[str, Any] | None = None
        self._talk: UserTalk | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the rows of a split, in the order of the file."""
        known = dict.fromkeys(row.get("split", "train") for row in self._rows.values())
        check_known("split", split, tuple(known), self.name)
        return [
            Task(key, row.get("kind", ""), split, dict(row))
            for key, row in self._rows.items()
            if row.get("split", "train") == split
        ]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start the servers and return the first observation; the seed has no effect."""
        self.close()
        row = self._rows.get(task.id)
        if row is None:
            raise EnvironmentFailure(
                f"{self.name} has no task {task.id!r}.{did_you_mean(task.id, self._rows)}"
            )
        self._open = McpServers(self._servers, **self._limits)
        self._row, self._calls, self._said = row, list[dict[str, Any]](), ""
        offered = self._offered(self._open)
        if row.get("user") is None:
            return Observation(row["prompt"], tools=offered)
        self._talk = UserTalk(row["user"], _GREETING, [row["prompt"]])
        handed = self._talk.hand_over()
        return Observation("", tools=offered, user=handed.user)

    def step(self, action: str) -> Observation:
        """Take one action of the policy, or the user's message if the episode waits for it."""
        if self._row is None or self._open is None:
            raise EnvironmentFailure(NO_EPISODE)
        if self._talk is not None and self._talk.waits:
            self._talk.hear(action)
            return self._end(self._row, self._said) if self._talk.over else Observation(action)
        said = read_action(action)
        if said is None or not (said.calls or said.text.strip()):
            return Observation(_NO_ACTION, valid=False)
        if said.calls:
            return self._called(self._open, said.calls)
        self._said = said.text
        return self._talk.hand_over(said.text) if self._talk is not None else self._end(self._row, said.text)

    def expert(self, task: Task) -> Sequence[str]:
        """Return the row's calls as actions, and then its answer.

        Raises:
            EnvironmentFailure: If the row has no `actions`.
        """
        row = self._rows[task.id]
        if "actions" not in row:
            raise EnvironmentFailure(f"task {task.id!r} has no actions; add them to its row for an expert.")
        calls = [
            ToolAction("", (ToolCall(each["name"], each.get("arguments", {})),)) for each in row["actions"]
        ]
        return [write_action(each) for each in (*calls, ToolAction(row.get("answer", "That is done.")))]

    def close(self) -> None:
        """End the servers."""
        servers, self._open, self._row, self._talk = self._open, None, None, None
        if servers is not None:
            servers.close()

    def _offered(self, servers: McpServers) -> tuple[Mapping[str, Any], ...]:
        """Return the schemas of the tools that the policy may call."""
        by_name = {tool["function"]["name"]: tool for tool in servers.tools}
        for name in self._tools or ():
            check_listed(name, by_name, f"environment.tools names {name!r}")
        return tuple(by_name[name] for name in self._tools or by_name)

    def _called(self, servers: McpServers, calls: Sequence[ToolCall]) -> Observation:
        assert self._row is not None
        texts, valid = [], True
        for call in calls:
            hidden = self._tools is not None and call.name not in self._tools
            result = no_tool(call.name) if hidden else servers.call(call.name, call.arguments)
            text = result.text if len(result.text) <= self._longest else result.text[: self._longest] + _CUT
            self._calls.append({"name": call.name, "arguments": dict(call.arguments), "result": text})
            texts.append(text)
            valid &= not result.failed
        return Observation("", results=tuple(texts), valid=valid)

    def _end(self, row: Mapping[str, Any], answer: str) -> Observation:
        """End the servers, and return the last observation with the reward of the episode."""
        if self._reward is not None:
            reward = plain_scalar(self._reward(deepcopy(dict(row)), answer, self._calls))
            if not isinstance(reward, int | float) or not math.isfinite(reward):
                raise EnvironmentFailure(
                    f"environment.reward must return a finite number, got {reward!r:.60}."
                )
        else:
            reward = float("answer" in row and _words(answer) == _words(row["answer"]))
        self.close()
        return Observation("", reward=float(reward), terminated=True, success=reward >= 1)


def _words(text: str) -> list[str]:
    return text.casefold().split()


def _read(file: Path) -> dict[str, Mapping[str, Any]]:
    """Return the rows of a file by id.

    Raises:
        DataError: If a row is malformed, an id occurs twice, or there is no row.
    """
    rows: dict[str, Mapping[str, Any]] = {}
    for number, (where, row) in enumerate(read_rows(file)):
        known = {key: row[key] for key in _Row.__annotations__ if key in row}
        check_shape(known, _Row, where, DataError)
        key = row.get("id", f"{number}")
        if key in rows:
            raise DataError(f"{where}: id {key!r} stands twice. Make ids unique, or leave them out.")
        rows[key] = row
    if not rows:
        raise DataError(f"{file} holds no task. Write one JSON object with a prompt a line.")
    return rows
