"""The child's side of a world in a process of its own: takes calls from a pipe, answers in JSON.

Only texts, numbers, lists and dicts cross the pipe, so nothing of the environment has to be understood, or even
importable, on the other side. Torch is not imported here; a child starts in about 0.1 s.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import select
import signal
import socket
import threading
import traceback
from typing import Any

from perturn.envs.load import make_environment
from perturn.envs.pipe import HEAD
from perturn.errors import BystanderLost, ConfigError, DataError, EnvironmentFailure, PerturnError, WorldLost
from perturn.faults import observation_faults
from perturn.io import plain
from perturn.types import Observation, Task

RAISED: dict[str, type[PerturnError]] = {
    "setting": ConfigError,
    "data": DataError,
    "bystander": BystanderLost,
    "lost": WorldLost,
    "world": EnvironmentFailure,
}
"""Exceptions that a world elsewhere may raise on our side. None ends a run midway, and a world cannot name another."""


def main(pipe: int, lifeline: int) -> None:
    """Answer calls until the parent hangs up.

    Args:
        pipe: File descriptor that calls come from and answers go to.
        lifeline: Socket on which nothing is ever sent; it ends with the parent.
    """
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


def told(error: BaseException) -> dict[str, str]:
    """An exception as texts: one of `RAISED`, and what it says, with its type and place if it is not one of ours."""
    kind = next((kind for kind, each in RAISED.items() if isinstance(error, each)), None)
    text = plain.told(error)
    if kind is None:
        text = f"{type(error).__name__}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    if not isinstance(error, PerturnError) and frames:
        last = frames[-1]
        text += f" (at {last.filename}:{last.lineno}, in {last.name}: {last.line})"
    return {"error": kind or "world", "text": plain.mended(text)}


class PlainWorld:
    """The calls of an `Environment` and an `Expert`, with plain data in and out."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def facts(self) -> dict[str, Any]:
        """Name and abilities of the world."""
        return {"name": self._env.name} | {
            each: hasattr(self._env, each) for each in ("expert", "demonstration")
        }

    def tasks(self, split: str) -> list[dict[str, Any]]:
        """All tasks of a split."""
        return [_plain_task(task) for task in self._env.tasks(split)]

    def reset(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        """Start an episode."""
        return _plain_observation("reset", self._env.reset(Task(**task), seed))

    def step(self, action: str) -> dict[str, Any]:
        """Take one action."""
        return _plain_observation("step", self._env.step(action))

    def expert(self, task: dict[str, Any]) -> list[str]:
        """Actions that solve a task."""
        actions = list(self._env.expert(Task(**task)))
        if not all(isinstance(action, str) for action in actions):
            raise EnvironmentFailure(f"expert must return texts, got {actions!r:.200}.")
        return actions

    def demonstration(self, task: dict[str, Any]) -> list[tuple[str, str]]:
        """Thoughts and actions that solve a task."""
        said = [tuple(turn) for turn in self._env.demonstration(Task(**task))]
        if not all(len(turn) == 2 and all(isinstance(text, str) for text in turn) for turn in said):
            raise EnvironmentFailure(f"demonstration must return (thought, action) texts, got {said!r:.200}.")
        return said

    def close(self) -> None:
        """Release what the world holds."""
        self._env.close()


def _plain_task(task: Task) -> dict[str, Any]:
    """A task as JSON can carry it."""
    fields = {
        **{each.name: getattr(task, each.name) for each in dataclasses.fields(Task)},
        "data": dict(task.data),
    }
    try:
        same = json.loads(json.dumps(fields, allow_nan=False)) == fields
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        raise EnvironmentFailure(
            f"data of task {task.id!r} does not survive JSON: {fields['data']!r:.200}; keep numbers, texts, lists and "
            "dicts with text keys in it (perturn check-env says more), or set worlds.processes=0."
        )
    return fields


def _plain_observation(call: str, answer: object) -> dict[str, Any]:
    """An observation as JSON can carry it.

    Raises:
        EnvironmentFailure: If it is none, or one of its values is of the wrong kind.
    """
    for found in observation_faults(answer):
        raise EnvironmentFailure(f"{call} returned {found}")
    assert isinstance(answer, Observation)
    fields = {each.name: getattr(answer, each.name) for each in dataclasses.fields(Observation)}
    return fields | {"reward": float(answer.reward)}
