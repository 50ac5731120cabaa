"""The process of an agent: started with its task, bounded, and killed with all that it started."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from perturn.envs import die_with_parent
from perturn.errors import EnvironmentFailure

_OUTPUT = 2**16
"""Bytes of the end of its output that are kept, of each stream."""
_LINES = 3
"""Lines of the end of what it wrote that an error quotes."""
_MOMENT = 0.1
"""Seconds between two looks at whether it has ended, while something that it started holds its output open."""
_REAP_S = 5.0
"""Seconds that a killed process has to end."""


class AgentProcess:
    """A program that plays one episode, in a session of its own.

    It reads its task as JSON on its standard input, and in the file that `PERTURN_TASK` names.
    """

    def __init__(
        self,
        command: Sequence[str],
        task: Mapping[str, Any],
        variables: Mapping[str, str],
        on_end: Callable[[], None],
        *,
        memory: int = 0,
    ) -> None:
        """Start it.

        Args:
            command: Program and arguments.
            task: What it is to do.
            variables: Its environment.
            on_end: Called in another thread once it has ended by itself.
            memory: Bytes of memory of each of its processes; 0: no limit.

        Raises:
            EnvironmentFailure: If no process can be started.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="perturn-agent-", ignore_cleanup_errors=True)
        file = Path(self._folder.name) / "task.json"
        file.write_text(json.dumps(task), encoding="utf-8")
        self._kept = {"stdout": b"", "stderr": b""}
        self._lifeline, theirs = socket.socketpair()
        wrapped = [sys.executable, "-I", "-S", die_with_parent.__file__, str(theirs.fileno()), str(memory)]
        try:
            with theirs, file.open("rb") as given:
                self._process = subprocess.Popen(
                    [*wrapped, *command],
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    env={**variables, "PERTURN_TASK": str(file)},
                )
        except OSError as error:
            self._lifeline.close()
            self._folder.cleanup()
            raise EnvironmentFailure(
                f"no process for an agent can be started: {error}; set explore.concurrency to fewer."
            ) from error
        self._closer = weakref.finalize(self, _kill, self._process, self._lifeline, self._folder)
        self._thread = threading.Thread(target=self._listen, args=(on_end,), name="agent", daemon=True)
        self._thread.start()

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Kill it and all that it started; nothing more is read of what it writes."""
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
        lines = [line.strip()[:200] for line in written.splitlines() if line.strip()][-_LINES:]
        return f"{how}; it wrote: {' | '.join(lines)}" if lines else how

    def _listen(self, on_end: Callable[[], None]) -> None:
        """Keep the end of what it writes until it ends."""
        streams: dict[str, IO[bytes] | None] = {
            "stdout": self._process.stdout,
            "stderr": self._process.stderr,
        }
        with selectors.DefaultSelector() as waiting:
            for name, stream in streams.items():
                assert stream is not None
                os.set_blocking(stream.fileno(), False)
                waiting.register(stream, selectors.EVENT_READ, name)
            ended = False
            while waiting.get_map() and not ended:
                ended = self._process.poll() is not None  # what it wrote before is there to be read
                while ready := waiting.select(0 if ended else _MOMENT):
                    for key, _ in ready:
                        self._keep(key.data, key.fileobj, waiting)
        self._process.wait()
        for stream in streams.values():
            assert stream is not None
            stream.close()
        on_end()

    def _keep(self, name: str, stream: Any, waiting: selectors.BaseSelector) -> None:
        said = stream.read(2**16)
        if said:
            self._kept[name] = (self._kept[name] + said)[-_OUTPUT:]
        elif said is not None:
            waiting.unregister(stream)


def _kill(process: subprocess.Popen[bytes], lifeline: socket.socket, folder: Any) -> None:
    """Kill a process, its group and its descendants, and reap it."""
    others = []
    with suppress(psutil.Error):
        others = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for other in others:  # in a session of its own
        with suppress(psutil.Error):
            other.kill()
    with suppress(subprocess.TimeoutExpired):  # it may hang in the kernel, which nobody can end
        process.wait(_REAP_S)
    lifeline.close()
    folder.cleanup()
