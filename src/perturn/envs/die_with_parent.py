"""Have a process and all it starts killed once its parent is gone; also a script that then becomes another program.

Standard library alone, and nothing of Perturn: `python -I -S die_with_parent.py LIFELINE MEMORY PROGRAM...` limits the
memory of the program to so many bytes (0: no limit) and becomes it.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import sys
import threading


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
