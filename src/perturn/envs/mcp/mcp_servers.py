"""Start MCP servers for an episode, call their tools over standard streams with time limits, and kill them at the end.

The module needs `pip install "perturn[mcp]"`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import psutil

from perturn.engines.event_loop import EventLoop
from perturn.envs.json_rows import whole
from perturn.errors import ConfigError, EnvironmentFailure, WorldLost, check_free, check_known
from perturn.io.plain_data import mended
from perturn.io.secrets import redacted, without_secrets

_DIE_WITH_PARENT = (
    "import ctypes, os, signal, sys; "
    "sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, signal.SIGKILL); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Python program that has the kernel kill this process when the parent dies (Linux), and then executes the server."""
_LONGEST_LINE = 2**24
"""Largest message of a server, in bytes."""
_WORDS = 2000
"""Number of characters at the end of a server's error stream that errors quote."""
_DEATH_S = 0.2
"""Seconds to wait for each server's exit code after a failed call, to tell whether the server died."""
_CLOSE_S = 1.0
"""Seconds that a server has to exit after its input is closed; then it is killed."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one MCP server."""

    command: list[str]
    """Program and arguments, such as `[python, -m, my_server]`."""
    env: dict[str, str] = field(default_factory=dict)
    """Additional environment variables of the server. Do not write API keys here; name them in `pass_env`."""
    pass_env: list[str] = field(default_factory=list)
    """Environment variables with secrets to pass to the server. Others that look like secrets are removed."""
    cwd: str | None = None
    """Working folder of the server; None: the folder of this process."""
    tools: list[str] | None = None
    """Names of the server's tools that are offered; None: all. Two servers cannot offer a tool of the same name."""

    def __post_init__(self) -> None:
        if not self.command or not all(self.command):
            raise ValueError("command must name a program, such as [python, -m, my_server].")


@dataclass(frozen=True)
class ToolResult:
    """Result of a tool call, as text."""

    text: str
    failed: bool = False


def no_tool(name: str) -> ToolResult:
    """Return the result of a call of a tool that is not offered."""
    return ToolResult(f"Error: there is no tool {name!r}.", failed=True)


class McpServers:
    """The running MCP servers of one episode. Do not call one object from two threads at once."""

    def __init__(
        self, servers: Sequence[ServerSettings], *, start_seconds: float, call_seconds: float
    ) -> None:
        """Start the servers and list their tools.

        Args:
            servers: Settings of the servers.
            start_seconds: Time limit for starting a server, in seconds.
            call_seconds: Time limit of a call, in seconds.

        Raises:
            EnvironmentFailure: If a server does not start.
            ConfigError: If two servers offer a tool of the same name, or a server has no tool that its settings name.
        """
        self._call_seconds = call_seconds
        self._passed = {name for server in servers for name in server.pass_env}
        self._sessions: dict[str, Any] = {}
        self._processes: list[asyncio.subprocess.Process] = []
        self._error_ends: list[Callable[[], str]] = []
        self.tools: list[dict[str, Any]] = []
        """Schemas of all tools, in the form that chat templates expect."""
        self._loop = EventLoop("perturn-mcp")
        self._over: asyncio.Event | None = None
        ready: Future[None] = Future()
        self._work = self._loop.start(self._live(servers, start_seconds, ready))
        try:
            ready.result()
        except BaseException:
            self.close()
            raise

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool and return its result. Errors of the tool and timeouts are results with `failed=True`.

        Raises:
            WorldLost: If a server has died.
        """
        if name not in self._sessions:
            return no_tool(name)
        found = self._loop.run(self._call(name, dict(arguments)))
        return replace(found, text=redacted(found.text, self._passed)) if found.failed else found

    def close(self) -> None:
        """End the servers and their descendants."""
        if self._over is not None:
            self._loop.run(self._end(self._over))
        with suppress(Exception):
            self._work.result(timeout=4 * _CLOSE_S)
        self._loop.close()

    async def _live(self, servers: Sequence[ServerSettings], seconds: float, ready: Future[None]) -> None:
        """Start the servers, and keep their sessions open until `close`.

        One asyncio task does both, since a session must be closed by the task that opened it.
        """
        self._over = asyncio.Event()
        try:
            async with AsyncExitStack() as stack:
                for number, server in enumerate(servers):
                    try:
                        async with asyncio.timeout(seconds):
                            await self._start(stack, server, number)
                    except TimeoutError as error:
                        raise EnvironmentFailure(
                            f"MCP server {' '.join(server.command)!r:.80} did not start within {seconds:g} seconds; "
                            "raise environment.start_seconds."
                        ) from error
                ready.set_result(None)
                await self._over.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(_plain(error))
            raise

    async def _start(self, stack: AsyncExitStack, server: ServerSettings, number: int) -> None:
        from mcp import ClientSession

        streams = await stack.enter_async_context(self._connected(server))
        session = await stack.enter_async_context(
            ClientSession(*streams, read_timeout_seconds=timedelta(seconds=self._call_seconds))
        )
        words = " ".join(server.command)
        try:
            await session.initialize()
            tools: dict[str, Any] = {}
            cursor, more = None, True
            while more:
                page = await session.list_tools(cursor)
                tools |= {tool.name: tool for tool in page.tools}
                cursor = page.nextCursor
                more = cursor is not None
            for name in tools if server.tools is None else server.tools:
                check_known(name, tools, f"environment.servers[{number}].tools names {name!r}")
                self._offer(tools[name], session)
        except (ConfigError, asyncio.CancelledError):
            raise
        except Exception as error:  # a server may send anything
            said = redacted(f"{error}{self._error_ends[number]()}", self._passed)
            raise EnvironmentFailure(
                f"MCP server {words!r:.80} did not start: {type(error).__name__}: {said}"
            ) from error

    def _offer(self, tool: Any, session: Any) -> None:
        remedy = "List the tools to offer in `tools` of one of the two servers, or leave the server out."
        check_free(tool.name, self._sessions, "an MCP server offers a tool", remedy)
        self._sessions[tool.name] = session
        function = {"name": tool.name, "description": tool.description or "", "parameters": tool.inputSchema}
        self.tools.append({"type": "function", "function": function})

    @asynccontextmanager
    async def _connected(self, server: ServerSettings) -> AsyncIterator[tuple[Any, Any]]:
        """Start a server's process, and yield the stream of its messages and the stream of messages to it."""
        process = await _start_process(server)
        self._processes.append(process)
        pipes = _Pipes(process)
        self._error_ends.append(pipes.error_end)
        tasks = [asyncio.create_task(work()) for work in (pipes.listen, pipes.speak, pipes.overhear)]
        try:
            yield pipes.heard_out, pipes.said_in
        finally:
            await _stop_process(process, tasks)
            pipes.close()

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        from mcp.shared.exceptions import McpError

        try:
            async with asyncio.timeout(self._call_seconds + _CLOSE_S):
                answer = await self._sessions[name].call_tool(name, arguments)
        except (McpError, TimeoutError) as error:
            await self._refuse_dead(name)
            if isinstance(error, TimeoutError) or "Timed out" in str(error):
                said = f"{name} gave no answer within {self._call_seconds:g} seconds."
                return ToolResult(f"Error: {said}", failed=True)
            return ToolResult(f"Error: {mended(str(error))}", failed=True)
        except Exception as error:  # noqa: BLE001  a server may send anything; the policy sees the error as a result
            await self._refuse_dead(name)
            return ToolResult(f"Error: {type(error).__name__}: {mended(str(error))}", failed=True)
        return ToolResult("\n".join(map(_text, answer.content)), failed=bool(answer.isError))

    async def _refuse_dead(self, name: str) -> None:
        """Raise `WorldLost` if any server has died; `name` is the called tool, for the message."""
        for number, process in enumerate(self._processes):
            with suppress(TimeoutError):
                async with asyncio.timeout(_DEATH_S):
                    await process.wait()
            if process.returncode is not None:
                quoted = redacted(self._error_ends[number](), self._passed)
                raise WorldLost(
                    f"an MCP server died in a call of {name!r} with exit code {process.returncode}{quoted}"
                )

    async def _end(self, over: asyncio.Event) -> None:
        over.set()


class _Pipes:
    """Connects a server's standard streams to message streams, and keeps the end of its error stream."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        import anyio

        self._process = process
        self._words = ""
        self._asked: int | str | None = None
        """Id of the newest request."""
        self._heard_in, self.heard_out = anyio.create_memory_object_stream[Any](16)
        self.said_in, self._said_out = anyio.create_memory_object_stream[Any](16)

    async def listen(self) -> None:
        """Read messages until the process closes its output; other lines, such as a banner, are skipped.

        A line that is too long counts as an error in answer to the newest request.
        """
        from mcp.shared.message import SessionMessage
        from mcp.types import JSONRPCMessage

        async with self._heard_in:
            while (text := await self._line()) != "":
                if text is None:
                    error = {"code": 0, "message": f"the result has more than {_LONGEST_LINE:,} bytes"}
                    text = json.dumps({"jsonrpc": "2.0", "id": self._asked, "error": error})
                with suppress(ValueError, RecursionError):
                    data = whole(json.loads(text), text, "an MCP server")
                    await self._heard_in.send(SessionMessage(JSONRPCMessage.model_validate(data)))

    async def _line(self) -> str | None:
        """Return the next line; an empty text at the end of the output, and None for a line that is too long."""
        assert self._process.stdout is not None
        is_long = False
        while True:
            try:
                line = await self._process.stdout.readuntil()
            except asyncio.IncompleteReadError as end:
                line = end.partial
            except asyncio.LimitOverrunError as error:
                is_long = True
                await self._process.stdout.readexactly(error.consumed)
                continue
            return None if is_long and line else line.decode(errors="replace")

    async def speak(self) -> None:
        """Write messages until the session closes its stream."""
        from mcp.types import JSONRPCRequest

        assert self._process.stdin is not None
        async for message in self._said_out:
            if isinstance(message.message.root, JSONRPCRequest):
                self._asked = message.message.root.id
            text = message.message.model_dump_json(by_alias=True, exclude_none=True)
            self._process.stdin.write(text.encode() + b"\n")
            await self._process.stdin.drain()

    async def overhear(self) -> None:
        """Keep the end of the error stream."""
        assert self._process.stderr is not None
        while some := await self._process.stderr.read(4096):
            self._words = (self._words + some.decode(errors="replace"))[-_WORDS:]

    def error_end(self) -> str:
        """Return the end of an error message, which quotes the end of the process's error stream."""
        return f"; it wrote: {self._words.strip()}" if self._words.strip() else "."

    def close(self) -> None:
        """Close all message streams."""
        for end in (self._heard_in, self.heard_out, self.said_in, self._said_out):
            end.close()


async def _start_process(server: ServerSettings) -> asyncio.subprocess.Process:
    """Start the process of a server.

    Raises:
        EnvironmentFailure: If the command cannot be started.
    """
    try:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-ISc", _DIE_WITH_PARENT, *server.command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=without_secrets(os.environ, server.pass_env) | server.env,
            cwd=server.cwd,
            limit=_LONGEST_LINE,
        )
    except OSError as error:
        raise EnvironmentFailure(f"MCP server {server.command[0]!r} cannot be started: {error}.") from error


async def _stop_process(process: asyncio.subprocess.Process, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Close the input of a process, kill it with its descendants after a time limit, and end the tasks on its pipes."""
    assert process.stdin is not None
    begun = _children(process.pid)
    process.stdin.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_S):
            await process.wait()
    for child in [*begun, *_children(process.pid)]:
        with suppress(psutil.Error):
            child.kill()
    with suppress(ProcessLookupError):
        process.kill()
    with suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_S):  # the tasks end by themselves once the pipes are closed
            await asyncio.gather(process.wait(), *tasks, return_exceptions=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _children(pid: int) -> list[psutil.Process]:
    """Return all descendants of a process."""
    with suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _text(part: Any) -> str:
    """Return a part of a result as text; other content is replaced by its type, such as `[image image/png]`."""
    if part.type == "text":
        return mended(part.text)
    if part.type == "resource" and getattr(part.resource, "text", None) is not None:
        return mended(part.resource.text)
    return f"[{part.type} {getattr(part, 'mimeType', None) or ''}]".replace(" ]", "]")


def _plain(error: BaseException) -> BaseException:
    """Return the first exception in a (nested) exception group, or the exception itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
