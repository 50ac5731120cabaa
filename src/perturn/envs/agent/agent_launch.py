"""Two ways to start an agent: a command as a new process, a function as a fork of a process that imported it.

A fork costs a hundredth of the time of an interpreter that imports OpenAI's client. The process that is forked runs no
agent itself, so that each episode begins with a freshly imported module.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from perturn.envs import die_with_parent
from perturn.envs.agent import agent_function
from perturn.errors import EnvironmentFailure

_START_S = 300.0
"""Seconds that a module may take to be imported."""


@dataclass(frozen=True)
class Streams:
    """File descriptors that an agent gets, and that its starter closes on this side."""

    given: int
    """Its standard input: the task."""
    out: int
    err: int
    lifeline: int
    """Ends with this process, and the agent with it."""


class Running(Protocol):
    """An agent that was started, the leader of its own session and process group."""

    pid: int

    def poll(self) -> int | None:
        """Return its exit code, negative where a signal ended it; None while it runs."""
        ...


class Launch(Protocol):
    """A way to start an agent."""

    def __call__(self, streams: Streams, variables: Mapping[str, str], memory: int, folder: Path) -> Running:
        """Start it.

        Args:
            streams: Its descriptors.
            variables: Its environment.
            memory: Bytes of memory of each of its processes; 0: no limit.
            folder: For files of this episode.

        Raises:
            EnvironmentFailure: If it cannot be started.
        """
        ...


@dataclass(frozen=True)
class Command:
    """A command line."""

    program: Sequence[str]

    def __call__(self, streams: Streams, variables: Mapping[str, str], memory: int, folder: Path) -> Running:
        """Start it as a new process."""
        wrapped = [sys.executable, "-I", "-S", die_with_parent.__file__, str(streams.lifeline), str(memory)]
        try:
            return subprocess.Popen(
                [*wrapped, *self.program],
                stdin=streams.given,
                stdout=streams.out,
                stderr=streams.err,
                pass_fds=(streams.lifeline,),
                start_new_session=True,
                env=variables,
            )
        except OSError as error:
            raise EnvironmentFailure(
                f"no process for an agent can be started: {error}; set explore.concurrency to fewer."
            ) from error


class Function:
    """A function that agents are runs of; agents of one process share the process that they are forks of."""

    def __init__(self, name: str, python: str | None = None) -> None:
        """Start without importing anything.

        Args:
            name: Of the function, as `module:rollout` or `file.py:rollout`.
            python: Interpreter that it needs; None: this one.
        """
        self._name, self._python = name, python
        self._server: subprocess.Popen[bytes] | None = None
        self._one_at_a_time = threading.Lock()

    def __call__(self, streams: Streams, variables: Mapping[str, str], memory: int, folder: Path) -> Running:
        """Start it as a fork."""
        order = folder / "order.json"
        order.write_text(json.dumps({"variables": dict(variables), "memory": memory}), encoding="utf-8")
        status, theirs = os.pipe()
        descriptors = [streams.given, streams.out, streams.err, streams.lifeline, theirs]
        try:
            with self._one_at_a_time:
                pid = self._fork(str(order).encode(), descriptors)
        except OSError as error:
            os.close(status)
            self._stop()
            raise EnvironmentFailure(
                f"{self._name}: the process that its agents are forks of has ended: {error}."
            ) from error
        finally:
            os.close(theirs)
        return _Fork(pid, status)

    def _fork(self, order: bytes, descriptors: Sequence[int]) -> int:
        if self._server is None or self._server.poll() is not None:
            self._start()
        socket.send_fds(self._control, [order], list(descriptors))
        said = self._control.recv(16)
        if not said:
            raise OSError("it closed its connection")
        return int(said)

    def _start(self) -> None:
        self._stop()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_START_S)
        lifeline, their_lifeline = socket.socketpair()
        passed = (theirs.fileno(), their_lifeline.fileno())
        with theirs, their_lifeline:
            self._server = subprocess.Popen(
                function_program("serve", self._python, self._name, *map(str, passed)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # an import of this module here has printed the same
                pass_fds=passed,
                start_new_session=True,
            )
        self._closer = weakref.finalize(self, _close, self._server, self._control, lifeline)

    def _stop(self) -> None:
        if self._server is not None:
            self._server = None
            self._closer()


@cache
def function_of(name: str, python: str | None = None) -> Function:
    """Return the function of a name, `module:rollout` or `file.py:rollout`, in an interpreter."""
    return Function(name, python)


def function_program(job: str, python: str | None, name: str, *given: str) -> list[str]:
    """Return the command line of `agent_function`.

    Args:
        job: `list` or `serve`.
        python: Interpreter; None: this one, which then imports from where this process does.
        name: Of the function.
        *given: As `agent_function.main` takes it.
    """
    folders = json.dumps(None if python else sys.path)
    return [python or sys.executable, "-u", agent_function.__file__, job, folders, name, *given]


def _close(server: subprocess.Popen[bytes], *ends: socket.socket) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    for end in ends:
        end.close()


class _Fork:
    """A fork, which is not our child: it says its exit code in a pipe that ends with it."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._status = status
        os.set_blocking(status, False)
        self._closer = weakref.finalize(self, os.close, status)

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        if self._code is None:
            with suppress(BlockingIOError):
                said = os.read(self._status, 16)
                self._code = int(said) if said else -signal.SIGKILL
                self._closer()
        return self._code
