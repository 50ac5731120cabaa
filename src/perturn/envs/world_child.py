"""The child's side of a world in a process of its own: takes calls from a pipe, answers in JSON."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import threading

from perturn.envs.load_environment import make_environment
from perturn.envs.remote_worlds import PlainWorld, told
from perturn.envs.world_pipe import HEAD


def main(pipe: int, lifeline: int) -> None:
    """Answer the calls of a pipe until the parent hangs up; nothing is sent on the lifeline, which ends with it."""
    _die_with_parent(lifeline)
    _serve(socket.socket(fileno=pipe))


def _die_with_parent(lifeline: int) -> None:
    """Have this process and all it started killed once the parent's end of the lifeline closes.

    On Linux the kernel does it, even while a hung call holds the interpreter; elsewhere a thread does.
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


def _serve(pipe: socket.socket) -> None:
    world: PlainWorld | None = None
    calls = pipe.makefile("rb")
    while head := calls.read(HEAD.size):
        method, arguments = json.loads(calls.read(*HEAD.unpack(head)))
        try:
            if method == "open":
                world = PlainWorld(make_environment(*arguments))
                method, arguments = "facts", ()
            reply = json.dumps({"value": getattr(world, method)(*arguments)})
        except BaseException as error:  # noqa: BLE001  the code of others, which may also call sys.exit
            reply = json.dumps(told(error))
        pipe.sendall(HEAD.pack(len(reply)) + reply.encode())
