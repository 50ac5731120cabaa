"""Main program of a child process that holds one environment: it reads calls from a pipe and answers in JSON."""

from __future__ import annotations

import json
import socket

from perturn.envs.die_with_parent import die_with_parent
from perturn.envs.load_environment import make_environment
from perturn.envs.remote_worlds import PlainWorld, error_reply
from perturn.envs.world_pipe import HEAD


def main(pipe: int, lifeline: int) -> None:
    """Answer calls until the parent closes the pipe.

    Args:
        pipe: File descriptor of the socket for calls and answers.
        lifeline: File descriptor of a socket without data. If the parent dies, the socket closes, and this process is
            killed.
    """
    die_with_parent(lifeline)
    _serve(socket.socket(fileno=pipe))


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
        except BaseException as error:  # noqa: BLE001  user code may raise anything, also SystemExit
            reply = json.dumps(error_reply(error))
        pipe.sendall(HEAD.pack(len(reply)) + reply.encode())
