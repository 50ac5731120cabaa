"""End the processes that vLLM started if the main process is killed, so that they free the device's memory.

A script of the standard library and psutil alone, which runs beside vLLM. Its input is a pipe that only our process
holds: a first byte means that vLLM has started, a second byte that it was closed. An end of the pipe before that is our
death.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from contextlib import suppress

import psutil

_PAUSE = 0.5
"""Seconds between checks of the started processes."""


class Watch:
    """Our side: begin before vLLM starts."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, str(os.getpid())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        assert self._process.stdout is not None
        self._process.stdout.read(1)  # it has seen what was there before
        self._process.stdout.close()

    def started(self) -> None:
        """Note the child processes started since as vLLM's."""
        self._say()

    def close(self) -> None:
        """Do nothing: nothing is left to end."""
        self._say()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _say(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has been killed, so nobody watches any more
            self._process.stdin.write(b".")


def main(owner: psutil.Process) -> None:
    """Watch."""
    before = set(owner.children(recursive=True))
    os.write(1, b".")
    found: set[psutil.Process] = set()
    heard = False
    while not heard:
        heard = bool(select.select([0], [], [], _PAUSE)[0])
        with suppress(psutil.NoSuchProcess):
            found |= set(owner.children(recursive=True)) - before
    if os.read(0, 1) and os.read(0, 1):
        return
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    main(psutil.Process(int(sys.argv[1])))
