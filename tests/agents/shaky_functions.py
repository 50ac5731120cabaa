"""Agents that are functions, most of which misbehave."""

import asyncio
import os
import random
import sys
import time


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
    if bad == "leaves early":
        await client.post(
            f"{str(client.base_url).removesuffix('/v1/')}/reward", body={"reward": 0.5}, cast_to=object
        )
        sys.exit()
    if bad == "hang":
        await asyncio.sleep(600)
    if bad in ("leaves", "leaves and hangs"):
        leave_a_child(task["pids"])
    if bad == "leaves and hangs":
        await asyncio.sleep(600)
    if bad == "many":
        for turn in range(50):
            said += [{"role": "assistant", "content": answers[0].choices[0].message.content}]
            said += [{"role": "user", "content": f"turn {turn}"}]
            answers = [await client.chat.completions.create(model="policy", messages=said)]
    reward = answers[0].usage.prompt_tokens if bad == "counts" else 0.25
    return {"reward": reward, "success": True, "drawn": random.random()}


def leave_a_child(pids):
    """Start a process that leaves the session and outlives the agent, without a program of its own."""
    if os.fork() == 0:
        os.setsid()
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        with open(pids, "a", encoding="utf-8") as file:
            file.write(f"{pid}\n")
        os._exit(0)
    os.wait()


def not_async(task, client):
    """Return a reward at once."""
    return 1.0
