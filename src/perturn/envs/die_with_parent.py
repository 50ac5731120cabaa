"""Have a process and all it starts killed once its parent is gone; also a script that then becomes another program.

Standard library alone, and nothing of Perturn: `python -I -S die_with_parent.py LIFELINE MEMORY PROGRAM...` limits the
memory of the program to MEMORY bytes (0: no limit) and then executes it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import select
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

_SET_CHILD_SUBREAPER = 36
"""Of `prctl`."""
_CHILDREN = Path("/proc/self/task")
"""Threads of this process, with the children of each."""


def die_with_parent(lifeline: int) -> None:
    """Have this process and all it started killed once the parent's end of the lifeline closes.

    On Linux the kernel does it, even while a hung call holds the interpreter, and also after an `exec`; elsewhere a
    thread does, which an `exec` ends.
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, int(signal.SIGKILL))
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        if select.select([lifeline], [], [], 0)[0]:  # the parent died before we listened
            os.killpg(0, signal.SIGKILL)
    else:
        threading.Thread(target=_wait_and_die, args=(lifeline,), daemon=True).start()


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that they can be found; on Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants() -> None:
    """Kill all that this process started and that it adopted; on Linux alone."""
    while children := [int(pid) for file in _CHILDREN.glob("*/children") for pid in file.read_text().split()]:
        for pid in children:
            with suppress(ProcessLookupError, ChildProcessError):  # another thread has waited for it
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)  # its children are ours now


def _wait_and_die(lifeline: int) -> None:
    select.select([lifeline], [], [])
    os.killpg(0, signal.SIGKILL)


def main(lifeline: int, memory: int, program: list[str]) -> None:
    """Become a program that dies with the parent."""
    die_with_parent(lifeline)
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"{program[0]!r} cannot be started: {error}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
