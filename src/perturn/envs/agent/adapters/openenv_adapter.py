"""Adapter for servers of OpenEnv 0.10 with MCP tools. A source is `http://host:8000#0:8`: an address and a seed range.

Each seed is a task. The policy sees the observation of `reset` and the server's tools. The episode ends when the server
says so, or with an answer without tool calls. For policies that cannot call tools, a source `http://host:8000#0:8@tool`
names a tool: an answer without calls is then passed to this tool as its argument. The reward is the last reward of a
step, as in OpenEnv's own collection of episodes, and 0 if no step gave a reward.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    _found = version("openenv")
except PackageNotFoundError:
    sys.exit("openenv is not installed; run: pip install openenv==0.10.0 openai")
if not _found.startswith("0.10."):
    sys.exit(f"this adapter is for openenv 0.10, and {_found} is installed; run: pip install openenv==0.10.0")

from openai import APIStatusError
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.mcp_client import MCPToolClient


def tasks(source: str) -> Iterator[dict[str, Any]]:
    """Yield one task for each seed of a source."""
    url, _, rest = source.rpartition("#")
    seeds, _, tool = rest.partition("@")
    first, mark, end = seeds.partition(":")
    if not (url and mark and first.isdecimal() and end.isdecimal()):
        sys.exit(f"expected an address and seeds such as http://localhost:8000#0:8, got {source!r}")
    try:
        schemas = asyncio.run(_schemas(url))
    except Exception as error:  # noqa: BLE001  the client library may raise anything
        sys.exit(f"no OpenEnv server answers at {url}: {error}; start it.")
    if tool and not schemas.get(tool, {}).get("properties"):
        sys.exit(f"{url} has no tool {tool!r} with an argument; it has {', '.join(schemas) or 'none'}")
    call = [tool, next(iter(schemas[tool]["properties"]))] if tool else None
    for number in range(int(first), int(end)):
        yield {"id": f"seed-{number}", "url": url, "number": number, "call": call}


async def _schemas(url: str) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each tool's arguments, by the tool's name."""
    async with MCPToolClient(base_url=url) as world:
        return {each.name: each.input_schema for each in await world.list_tools()}


async def rollout(task: dict[str, Any], client: Any) -> dict[str, Any]:
    """Play an episode with a server's tools and return its reward."""
    reward = 0.0
    async with MCPToolClient(base_url=task["url"]) as world:
        posed = await world.reset(seed=task["number"], episode_id=f"{task['id']}-{task['seed']}")
        messages: list[dict[str, Any]] = [{"role": "user", "content": _posed(posed.observation)}]
        tools = [
            {
                "type": "function",
                "function": {
                    "name": each.name,
                    "description": each.description,
                    "parameters": each.input_schema,
                },
            }
            for each in await world.list_tools()
        ]
        done = posed.done
        while not done:
            try:
                answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
            except APIStatusError as error:
                if error.code in ("limit_reached", "context_length_exceeded"):
                    break  # a limit truncates the episode, which keeps its reward
                raise
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            done = not said.tool_calls and task["call"] is None
            if not said.tool_calls and task["call"]:
                name, argument = task["call"]
                text, given, done = await _call(world, name, json.dumps({argument: said.content or ""}))
                messages.append({"role": "user", "content": text})
                reward = reward if given is None else float(given)
            for call in said.tool_calls or ():
                text, given, over = await _call(world, call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
                reward = reward if given is None else float(given)
                if done := over:
                    break
    return {"reward": reward}


async def _call(world: Any, name: str, arguments: str) -> tuple[str, float | None, bool]:
    """Execute a tool call; return its result, its reward, and whether it ended the episode."""
    try:
        read = json.loads(arguments or "{}")
    except ValueError:
        read = None
    if not isinstance(read, dict):
        return "Error: the arguments must be a JSON object.", None, False
    step = await world.step(CallToolAction(tool_name=name, arguments=read))
    seen = step.observation
    if getattr(seen, "error", None) is not None:
        return f"Error: {seen.error.message}", step.reward, step.done
    result = getattr(seen, "result", None)
    data = result.get("data", result) if isinstance(result, dict) else result
    return _text(data), step.reward, step.done


def _posed(seen: Any) -> str:
    """Return the text of an observation: its text field if there is exactly one, else all fields as JSON."""
    fields = seen.model_dump(exclude={"done", "reward", "metadata"})
    texts = [each for each in fields.values() if isinstance(each, str) and each]
    return texts[0] if len(texts) == 1 else _text(fields)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
