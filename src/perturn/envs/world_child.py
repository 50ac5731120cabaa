"""The child's side of a world in its own process: takes calls from a pipe, answers in JSON."""

from __future__ import annotations

import json
import socket

from perturn.envs.die_with_parent import die_with_parent
from perturn.envs.load_environment import make_environment
from perturn.envs.remote_worlds import PlainWorld, told
from perturn.envs.world_pipe import HEAD


def main(pipe: int, lifeline: int) -> None:
    """Answer the calls of a pipe until the parent hangs up; nothing is sent on the lifeline, which ends with it."""
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
        except BaseException as error:  # noqa: BLE001  the code of others, which may also call sys.exit
            reply = json.dumps(told(error))
        pipe.sendall(HEAD.pack(len(reply)) + reply.encode())
