"""Worlds in their own processes, with time limits: a world that crashes or hangs costs its own episode only.

A child is a fresh interpreter, never a fork, in its own session. It gets the name and settings of the world to make. It
differs from `multiprocessing`'s spawned process in that the main module is not imported again: so scripts need no `if
__name__ == "__main__"`, and children hold no torch. All that a child prints is read, and its last lines are quoted when
it dies. A child and whatever it started (a JVM) are killed together, and they die with this process, even if that is
killed itself. Only processes that a world starts in yet another session outlive it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

from perturn.config.sections import Section, Worlds
from perturn.envs import ENVIRONMENTS
from perturn.envs.remote_worlds import RAISED, RemoteWorld, value_of
from perturn.envs.world_pipe import Garbled, Pipe
from perturn.errors import ConfigError, EnvironmentFailure, WorldLost
from perturn.traits import traits_of

_logger = logging.getLogger(__name__)

_MEMORY = 512 * 2**20
"""Bytes of free memory that one world is reckoned to need."""
_CLOSE_S = 5.0
"""Seconds a world may take to close before it is killed; it holds nothing worth waiting for."""
_WORDS = 4096
"""Bytes of a child's output that are kept."""
_LINES = 3
"""Lines of them that are quoted."""
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from perturn.envs.world_child import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


def plays_itself(section: Section) -> bool:
    """Return whether the episodes of an environment are programs that it plays itself."""
    return traits_of(ENVIRONMENTS.get(str(section["name"]))).plays_itself


def runs_here(section: Section, settings: Worlds) -> bool:
    """Return whether worlds are made in this process rather than in their own processes.

    Raises:
        ConfigError: If processes are asked for, and the environment's episodes start their own processes.
    """
    if settings.processes and plays_itself(section):
        raise ConfigError(
            f"worlds.processes is set, and each episode of {section['name']} starts its own processes; leave it out, "
            "and set concurrency to the number of episodes at a time."
        )
    if settings.processes is None:
        return traits_of(ENVIRONMENTS.get(str(section["name"]))).in_process
    return settings.processes == 0


def world_count(section: Section, settings: Worlds, concurrency: int) -> int:
    """Return how many worlds may be alive at a time, if `concurrency` episodes should be played at once.

    A process that waits for the model costs memory but no processor, and neither does a process that sleeps or waits
    for a
    network: so free memory bounds their number, and the number of cores does not.
    """
    if runs_here(section, settings):
        return concurrency
    if settings.processes is not None:
        return min(concurrency, settings.processes)
    return max(1, min(concurrency, psutil.virtual_memory().available // _MEMORY))


class ProcessWorlds:
    """Makes worlds in their own processes. The first is started at once, so that a wrong setting shows."""

    def __init__(self, section: Section, limits: Worlds) -> None:
        """Start the first world; if it dies or hangs at its start, it is started again, up to `limits.retries` times.

        Args:
            section: Section `environment` of the recipe.
            limits: Time limits.

        Raises:
            PerturnError: If it cannot start.
        """
        self._section, self._limits = json.loads(json.dumps(section, default=str)), limits
        first = self._first(limits.retries)
        self.facts = first.facts
        self._ready = [first]

    def _first(self, retries: int) -> _Process:
        """Start the first world."""
        while True:
            try:
                return _Process(self._section, self._limits)
            except WorldLost as error:
                if retries == 0:
                    raise
                retries -= 1
                _logger.warning("starting the first world again: %s", error)

    def __call__(self) -> RemoteWorld:
        """Return a world; its process starts with its first episode."""
        with suppress(IndexError):
            return RemoteWorld(self._ready.pop())
        return RemoteWorld(_Process(self._section, self._limits, self.facts))


class _Process:
    """A `Link` to a process, which is started when it is needed, and again after it died or ran into a limit."""

    def __init__(self, section: Section, limits: Worlds, facts: dict[str, Any] | None = None) -> None:
        self._section, self._limits = section, limits
        self._child: _Child | None = None
        self._left = 0.0
        """Seconds that are left of the episode; only those count that its world takes."""
        self.facts = facts or self._start()

    def call(self, method: str, *arguments: Any) -> Any:
        if self._child is None:
            self._start()
        limit = "step_seconds" if method == "step" else "start_seconds"
        seconds = getattr(self._limits, limit)
        if method not in ("reset", "step"):
            return self._ask(method, arguments, limit, seconds)
        if method == "reset":
            self._left = self._limits.episode_seconds
        if self._left < seconds:
            limit, seconds = "episode_seconds", self._left
        began = time.monotonic()
        try:
            return self._ask(method, arguments, limit, seconds)
        finally:
            self._left -= time.monotonic() - began

    def close(self) -> None:
        if self._child is not None:
            try:
                with suppress(EOFError, OSError, Garbled):
                    value_of(self._child.ask("close", (), _CLOSE_S))
            finally:
                self._stop()

    def _start(self) -> dict[str, Any]:
        try:
            self._child = _Child(self._limits.pass_env)
        except OSError as error:
            raise EnvironmentFailure(
                f"a process for a world cannot be started: {error}; set worlds.processes to fewer."
            ) from error
        self._closer = weakref.finalize(self, self._child.kill)
        self._left = self._limits.episode_seconds
        try:
            facts: dict[str, Any] = self.call("open", self._section)
        except BaseException:
            self._stop()
            raise
        return facts

    def _ask(self, method: str, arguments: Sequence[Any], limit: str, seconds: float) -> Any:
        """Return the value of a method; `limit` names the setting with its time limit in seconds."""
        assert self._child is not None
        child, what = self._child, _in_words(method, *arguments)
        try:
            return value_of(child.ask(method, arguments, seconds))
        except TimeoutError:
            how = (
                f"was killed in {what}, where worlds.{limit} = {getattr(self._limits, limit):g} ran out "
                "(raise it if the world is only slow)"
            )
        except (EOFError, OSError):
            how = f"died in {what}{child.ending()}"
        except Garbled as error:
            how = f"was killed in {what}: it sent {error}; with worlds.processes=0 nothing has to be sent"
        self._stop()
        words = child.last_words()
        raise WorldLost(f"the world's process {how}" + (f"; it wrote: {words}" if words else "."))

    def _stop(self) -> None:
        if self._child is not None:
            self._child = None
            self._closer()


def _in_words(method: str, argument: Any = None, *more: Any) -> str:
    """Return a call in words."""
    if method == "ability":
        return _in_words(argument, *more[0])
    if method == "open":
        return "its start"
    if method == "declared":
        return "saying its rules"
    if isinstance(argument, dict) and "id" in argument:
        return f"{method} of task {argument['id']!r}"
    return f"{method}({argument!r:.80})"


class _Child:
    """A process that serves one world, and the pipes to it."""

    def __init__(self, passed_variables: Collection[str]) -> None:
        ours, theirs = socket.socketpair()
        self._lifeline, their_lifeline = socket.socketpair()
        passed = (theirs.fileno(), their_lifeline.fileno())
        command = [sys.executable, "-u", "-c", _BOOT, json.dumps(sys.path), *map(str, passed)]
        self._pipe = Pipe(ours)
        with theirs, their_lifeline:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                pass_fds=passed,
                start_new_session=True,
                env=without_secrets(os.environ, passed_variables),
            )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._words = b""

    def ask(self, method: str, arguments: Sequence[Any], seconds: float) -> dict[str, Any]:
        """Return the child's answer to a call."""
        deadline = time.monotonic() + seconds
        self._pipe.post(json.dumps([method, arguments]).encode())
        while (left := deadline - time.monotonic()) > 0:
            ready = self._wait(min(left, 1.0))
            if self._output in ready:
                self._listen()
            if self._pipe in ready:
                if (message := self._pipe.exchange()) is not None:
                    return _reply(message)
            elif self._process.poll() is not None:  # a child of its own may hold the pipe open
                raise EOFError
        raise TimeoutError

    def _wait(self, seconds: float) -> list[Any]:
        """Return the pipe if it can be read, or written to if something is unsent, and the output if it can be read."""
        poll = select.poll()
        sources: dict[int, Any] = {self._pipe.end.fileno(): self._pipe}
        poll.register(self._pipe.end, select.POLLIN | (select.POLLOUT if self._pipe.unsent else 0))
        if not self._output.closed:
            sources[self._output.fileno()] = self._output
            poll.register(self._output, select.POLLIN)
        return [sources[descriptor] for descriptor, _ in poll.poll(1000 * seconds)]

    def ending(self) -> str:
        """Return how the process ended, in words."""
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return " (it closed its pipe)"
        return f" (killed by {signal.Signals(-code).name})" if code < 0 else f" with exit code {code}"

    def last_words(self) -> str:
        """Return the last lines the child wrote."""
        lines = [line.strip() for line in self._words.decode(errors="replace").splitlines() if line.strip()]
        return " | ".join(line[:200] for line in lines[-_LINES:])

    def kill(self) -> None:
        """Kill the process and all processes it started, read its last output, and reap it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # it may hang in the kernel, which nobody can end
            self._process.wait(_CLOSE_S)
        if not self._output.closed:
            self._listen()
            self._output.close()
        self._pipe.end.close()
        self._lifeline.close()

    def _listen(self) -> None:
        """Read a part of the child's output."""
        said = self._output.read(2**16)
        if said:
            self._words = (self._words + said)[-_WORDS:]
        elif said is not None:
            self._output.close()


def _reply(message: bytes) -> dict[str, Any]:
    """Return a child's answer, or `Garbled`."""
    try:
        reply = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise Garbled(f"no JSON ({error})") from error
    if not isinstance(reply, dict) or ("value" not in reply and reply.get("error") not in RAISED):
        raise Garbled(f"{message[:60]!r}")
    return reply


_NAME = re.compile(
    r"(KEYS?|TOKENS?)(_|\d|$)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|(^|_)(AUTH|PASS|PAT|COOKIES?|DSN)(_|$)|_PWD(_|$)",
    re.IGNORECASE,
)
_VALUE = re.compile(r"://[^/\s@]*:[^/\s@]+@|-----BEGIN [A-Z ]*PRIVATE KEY")
"""An address with a password in it, and a key in a text."""


def without_secrets(environ: Mapping[str, str], passed: Collection[str] = ()) -> dict[str, str]:
    """Return the variables without names or values that look like a key, except the ones passed by name."""
    return {
        name: value
        for name, value in environ.items()
        if name in passed or not (_NAME.search(name) or _VALUE.search(value))
    }
