"""Agent of your own: a loop around OpenAI's client. It plays a text game, and reports its reward at the end.

    perturn run recipes/agent-alfworld-like.yaml

The recipe trains the policy that answers the agent. This file does not depend on training. The agent also runs with any
other server: `OPENAI_BASE_URL=... python examples/agent.py < task.json`.
"""

import asyncio
import json
import re
import sys

from openai import AsyncOpenAI

from perturn.envs.alfworld.generated_games import ALFWorldLike  # replace by an environment of yours
from perturn.types import Task

SYSTEM = "Answer with one action on one line:\nAction: ..."
REMINDER = "That was not understood. Answer with the one line 'Action: ...'."
TURNS = 20
KINDS = ("pick_and_place_simple", "pick_heat_then_place_in_recep")


def tasks(split):
    """Return the games of a split, as rows."""
    return [
        {"id": one.id, "kind": one.kind, **one.data}
        for one in ALFWorldLike(kinds=KINDS, train_games=1800).tasks(split)
    ]


async def rollout(task, client):
    """Play a game. Return the reward, and whether the game was solved."""
    world = ALFWorldLike()
    seen = world.reset(Task(task["id"], task["kind"], task["split"], {"number": task["number"]}))
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": seen.text}]
    reward = 0.0
    for _ in range(TURNS):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message.content
        messages.append({"role": "assistant", "content": said})
        action = re.fullmatch(r"Action:\s*([^\n]*\S)", said.strip())
        if action is None:
            messages.append({"role": "user", "content": REMINDER})
            continue
        seen = world.step(action[1].strip())
        reward += seen.reward
        if seen.terminated:
            break
        messages.append({"role": "user", "content": seen.text})
    return {"reward": reward, "success": seen.success}


if __name__ == "__main__":  # as a program: read the task, and print the reward
    print(json.dumps(asyncio.run(rollout(json.load(sys.stdin), AsyncOpenAI()))))
