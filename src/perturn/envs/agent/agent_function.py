"""The process that agents which are functions are forks of: it imports the module once, and plays nothing itself."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import random
import resource
import signal
import socket
import sys
import traceback
from typing import Any

from openai import AsyncOpenAI

from perturn.envs.agent.agent_launch import received
from perturn.envs.die_with_parent import die_with_parent
from perturn.envs.load_environment import load_object


def main(name: str, control: int, lifeline: int) -> None:
    """Fork for each order, until the other side hangs up.

    Args:
        name: Of the function, as `module:rollout` or `file.py:rollout`.
        control: Descriptor of the socket that orders come from.
        lifeline: Descriptor that ends with the parent.
    """
    die_with_parent(lifeline)
    rollout = load_object(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that ended are reaped
    orders = socket.socket(fileno=control)
    while True:
        order, descriptors = received(orders)
        if not order:
            return
        pid = os.fork()
        if pid == 0:
            orders.close()
            os.close(lifeline)
            _play(name, rollout, order, descriptors)
        for each in descriptors:
            os.close(each)
        orders.send(str(pid).encode())


def _play(name: str, rollout: Any, order: str, descriptors: list[int]) -> None:
    """Play one episode in a fork, and end it."""
    code = 1
    *streams, lifeline, status = descriptors
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for target, each in enumerate(streams):
            os.dup2(each, target)
            os.close(each)
        die_with_parent(lifeline)
        with open(order, encoding="utf-8") as file:
            said = json.load(file)
        if memory := said["memory"]:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        os.environ.clear()
        os.environ.update(said["variables"])
        task = json.load(sys.stdin)
        _seed(task["seed"])
        print(f"\n{json.dumps(asyncio.run(_rollout(name, rollout, task)))}", flush=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr, flush=True)
    except BaseException:  # noqa: BLE001  an agent is code of others; the episode says how it ended
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os.write(status, str(code).encode())
        os._exit(code)


async def _rollout(name: str, rollout: Any, task: dict[str, Any]) -> object:
    if not inspect.iscoroutinefunction(rollout):
        sys.exit(f"{name} must be `async def rollout(task, client)`, got {rollout!r:.80}.")
    async with AsyncOpenAI() as client:
        found: object = await rollout(task, client)
        return found


def _seed(seed: int) -> None:
    """Seed the generators that all forks would else have in one state."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
