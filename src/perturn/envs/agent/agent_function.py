"""Runs `async def rollout(task, client)` in a process of its own: reads the task, prints what it returns."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys

from openai import AsyncOpenAI

from perturn.envs.load_environment import load_object


def main(name: str) -> None:
    """Play one episode.

    Args:
        name: Of the function, as `module:rollout` or `file.py:rollout`.
    """
    task = json.load(sys.stdin)
    rollout = load_object(name)
    if not inspect.iscoroutinefunction(rollout):
        sys.exit(f"{name} must be `async def rollout(task, client)`, got {rollout!r:.80}.")

    async def play() -> object:
        async with AsyncOpenAI() as client:
            return await rollout(task, client)

    print(f"\n{json.dumps(asyncio.run(play()))}", flush=True)
