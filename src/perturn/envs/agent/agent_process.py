"""The process of an agent: started with its task, bounded, and killed with all that it started."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from perturn.envs.agent.agent_launch import Launch, Running, Streams
from perturn.io.scratch import scratch_folder

_OUTPUT = 2**16
"""Bytes of the end of its output that are kept, of each stream."""
_LINES = 3
"""Lines of the end of its output that an error quotes."""
_MOMENT = 0.1
"""Seconds between two looks at whether it has ended, while something that it started holds its output open."""
_REAP_S = 5.0
"""Seconds that a killed process has to end."""


class AgentProcess:
    """A program that plays one episode, in its own session.

    It reads its task as JSON on its standard input, and in the file that `PERTURN_TASK` names.
    """

    def __init__(
        self,
        launch: Launch,
        task: Mapping[str, Any],
        variables: Mapping[str, str],
        on_end: Callable[[], None],
        *,
        memory: int = 0,
    ) -> None:
        """Start it.

        Args:
            launch: Starts it.
            task: What it is to do.
            variables: Its environment.
            on_end: Called in another thread once it has ended by itself.
            memory: Bytes of memory of each of its processes; 0: no limit.

        Raises:
            EnvironmentFailure: If no process can be started.
        """
        self._folder = scratch_folder()
        file = Path(self._folder.name) / "task.json"
        file.write_text(json.dumps(task), encoding="utf-8")
        self._kept = {"stdout": b"", "stderr": b""}
        self._key = variables.get("OPENAI_API_KEY", "")
        lifeline, theirs = socket.socketpair()
        pipes = {name: os.pipe() for name in self._kept}
        self._streams = {name: open(pipe[0], "rb", buffering=0) for name, pipe in pipes.items()}  # noqa: SIM115
        try:
            with theirs, file.open("rb") as given:
                out, err = (pipe[1] for pipe in pipes.values())
                streams = Streams(given.fileno(), out, err, theirs.fileno())
                variables = {**variables, "PERTURN_TASK": str(file)}
                self._process = launch(streams, variables, memory, Path(self._folder.name))
        except BaseException:
            lifeline.close()
            self._folder.cleanup()
            raise
        finally:
            for pipe in pipes.values():
                os.close(pipe[1])
        self._closer = weakref.finalize(self, _kill, self._process, lifeline, self._folder, file)
        self._thread = threading.Thread(target=self._listen, args=(on_end,), name="agent", daemon=True)
        self._thread.start()

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Kill it and all processes that it started; its further output is ignored."""
        self._closer()
        self._thread.join(_REAP_S)

    def result(self) -> Any:
        """Return the value of the last line of its output that is JSON; None if no line is."""
        for line in reversed(self._kept["stdout"].decode(errors="replace").splitlines()):
            with suppress(ValueError, RecursionError):
                return json.loads(line)
        return None

    def ending(self) -> str:
        """Say how it ended, with the last lines that it wrote."""
        code = self._process.poll()
        how = "was killed" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        written = (self._kept["stderr"] or self._kept["stdout"]).decode(errors="replace")
        for key in filter(None, (self._key, self._key.partition(".")[0])):
            written = written.replace(key, "KEY")  # errors are stored, and keys are not
        lines = [line.strip()[:200] for line in written.splitlines() if line.strip()][-_LINES:]
        return f"{how}; it wrote: {' | '.join(lines)}" if lines else how

    def _listen(self, on_end: Callable[[], None]) -> None:
        """Keep the end of its output until it ends."""
        with selectors.DefaultSelector() as waiting:
            for name, stream in self._streams.items():
                os.set_blocking(stream.fileno(), False)
                waiting.register(stream, selectors.EVENT_READ, name)
            ended = False
            while waiting.get_map() and not ended:
                ended = self._process.poll() is not None  # what it wrote before is there to be read
                while ready := waiting.select(0 if ended else _MOMENT):
                    for key, _ in ready:
                        self._keep(key.data, key.fileobj, waiting)
        while self._process.poll() is None:
            time.sleep(_MOMENT / 10)
        for stream in self._streams.values():
            stream.close()
        on_end()

    def _keep(self, name: str, stream: Any, waiting: selectors.BaseSelector) -> None:
        said = stream.read(2**16)
        if said:
            self._kept[name] = (self._kept[name] + said)[-_OUTPUT:]
        elif said is not None:
            waiting.unregister(stream)


def _kill(process: Running, lifeline: socket.socket, folder: Any, task: Path) -> None:
    """Kill a process, its group, its descendants, and every process with its task's environment variable; reap it."""
    others = []
    with suppress(psutil.Error):
        others = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for other in others:  # in a session of its own
        with suppress(psutil.Error):
            other.kill()
    until = time.monotonic() + _REAP_S  # it may hang in the kernel, which nobody can end
    while (detached := _detached(task)) and time.monotonic() < until:
        for pid in detached:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    while process.poll() is None and time.monotonic() < until:
        time.sleep(_MOMENT / 10)
    lifeline.close()
    folder.cleanup()


def _detached(task: Path) -> list[int]:
    """Return living processes that left an agent's session and outlived it, by their task (Linux)."""
    mark = f"PERTURN_TASK={task}\0".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found
