"""Agents that are functions, most of which misbehave."""

import asyncio
import random
import sys


async def rollout(task, client):
    """Ask twice, at the same time if the task says so; end as the task says."""
    said = [{"role": "user", "content": task["id"]}]
    asked = [
        client.chat.completions.create(model="policy", messages=said) for _ in range(task.get("at_once", 1))
    ]
    answers = await asyncio.gather(*asked)
    bad = task.get("bad")
    if bad == "crash":
        raise RuntimeError("a bug in the agent")
    if bad == "exit":
        sys.exit("gave up")
    if bad == "hang":
        await asyncio.sleep(600)
    if bad == "many":
        for turn in range(50):
            said += [{"role": "assistant", "content": answers[0].choices[0].message.content}]
            said += [{"role": "user", "content": f"turn {turn}"}]
            answers = [await client.chat.completions.create(model="policy", messages=said)]
    return {"reward": 0.25, "success": True, "drawn": random.random()}


def not_async(task, client):
    """Return a reward at once."""
    return 1.0
