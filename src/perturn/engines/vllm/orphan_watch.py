"""Watch process that ends vLLM's processes if the main process is killed, so that they free the device's memory.

This module also runs as a script, with the standard library and psutil alone. Its standard input is a pipe from the
main process. A first byte means that vLLM has started, and a second byte that vLLM was closed. If the pipe ends before
the second byte, the main process was killed.
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
    """The main process's side of the watch; create it before vLLM starts."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, str(os.getpid())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        assert self._process.stdout is not None
        self._process.stdout.read(1)  # the watch has now listed the earlier child processes
        self._process.stdout.close()

    def started(self) -> None:
        """Tell the watch process that vLLM has started; all child processes since the watch began are vLLM's."""
        self._say()

    def close(self) -> None:
        """Tell the watch process that vLLM was closed, and wait for the watch process to end."""
        self._say()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _say(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # the watch process was killed
            self._process.stdin.write(b".")


def main(owner: psutil.Process) -> None:
    """Run the watch process: if `owner` is killed, kill the child processes that it started after the watch."""
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
