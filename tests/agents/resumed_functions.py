"""An agent that guesses a number: a function that asks again until it is right, also with a second conversation."""

import asyncio
import json
import os
import random
from contextlib import suppress

from openai import APIStatusError, APITimeoutError


async def rollout(task, client):
    """Ask up to four times. Each odd turn is of a helper, whose conversation begins anew."""
    number = random.Random(task["seed"]).randrange(3)
    posed = [{"role": "system", "content": "Guess."}, {"role": "user", "content": f"0 to 2, hint {number}."}]
    messages = list(posed)
    reward = 0.0
    for turn in range(4):
        asked = messages if turn % 2 == 0 else [{"role": "user", "content": f"Help with turn {turn}."}]
        answer = await client.chat.completions.create(model="policy", messages=asked)
        said = answer.choices[0].message.content
        if turn % 2 == 0:
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Again."}]
        if said == task["secret"]:
            reward = 1.0
            break
    if task.get("clock"):
        print(json.dumps({"at": random.random()}))
    return {"reward": reward, "success": reward == 1}


async def talk(client, messages, turns, on=lambda said: False):
    """Ask for some turns, one after the other, until an answer ends the conversation."""
    for _ in range(turns):
        answer = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
        if on(answer.content):
            return
        messages = [*messages, answer, {"role": "user", "content": "Go on?"}]


def clock():
    """A number that is another one in each process."""
    return f"{random.SystemRandom().random()}"


async def forgetful(task, client):
    """Put a clock into the first message."""
    await talk(client, [{"role": "user", "content": clock()}], 2)
    return 1.0


async def dated(task, client):
    """Have a clock in the system prompt alone."""
    await talk(client, [{"role": "system", "content": clock()}, {"role": "user", "content": "Go."}], 2)
    return 1.0


async def hasty(task, client):
    """End after one answer if it is a stop."""
    await talk(client, [{"role": "user", "content": "Go on?"}], 3, lambda said: said == "stop")
    return 0.5


async def crashing(task, client):
    """Crash after the first answer if it is a stop."""

    def crash(said):
        if said == "stop":
            raise ValueError("cannot stop")

    await talk(client, [{"role": "user", "content": "Go on?"}], 2, crash)
    return 0.5


async def parallel(task, client):
    """Ask three helpers at the same time, then join them; send a seed of its own."""
    posed = [[{"role": "user", "content": f"Part {part}."}] for part in range(3)]
    asked = [
        client.chat.completions.create(model="policy", messages=each, seed=task["seed"]) for each in posed
    ]
    parts = [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]
    joined = [{"role": "user", "content": "Join " + " ".join(parts)}]
    await client.chat.completions.create(model="policy", messages=joined, seed=task["seed"])
    return 1.0


async def alike(task, client):
    """Send the same request four times in parallel."""
    said = [{"role": "user", "content": "Guess."}]
    await asyncio.gather(*(client.chat.completions.create(model="policy", messages=said) for _ in range(4)))
    return 1.0


async def impatient(task, client):
    """Give the first request up, and ask again; then ask a second time."""
    messages = [{"role": "user", "content": "Go."}]
    hurried = client.with_options(timeout=0.3, max_retries=0)
    with suppress(APITimeoutError):
        await hurried.chat.completions.create(model="policy", messages=messages)
    await talk(client, messages, 2)
    return 1.0


async def choosing(task, client):
    """Ask for three answers at once, and go on with the last one."""
    messages = [{"role": "user", "content": "Choose."}]
    answers = await client.chat.completions.create(model="policy", messages=messages, n=3)
    messages += [answers.choices[-1].message, {"role": "user", "content": "Again."}]
    await client.chat.completions.create(model="policy", messages=messages)
    return 1.0


def order(task):
    """The order in which two requests are sent: reversed if the program has run before."""
    has_run = os.path.exists(task["runs"])
    with open(task["runs"], "a", encoding="utf-8"):
        return [1, 0] if has_run else [0, 1]


async def reordered(task, client):
    """Ask two helpers at the same time."""
    parts = order(task)

    async def ask(part):
        await asyncio.sleep(0.5 * parts.index(part))
        said = [{"role": "user", "content": f"Part {part}."}]
        return await client.chat.completions.create(model="policy", messages=said)

    await asyncio.gather(ask(0), ask(1))
    return 1.0


async def swapped(task, client):
    """Ask two helpers, one after the other."""
    for part in order(task):
        said = [{"role": "user", "content": f"Part {part}."}]
        await client.chat.completions.create(model="policy", messages=said)
    return 1.0


async def punishing(task, client):
    """Give each turn a reward of 0.5, and the last turn before a rejected request another one."""
    url = os.environ["PERTURN_SESSION"] + "/reward"
    said, given = [{"role": "user", "content": "Go."}], None
    try:
        for _ in range(4):
            given = await client.chat.completions.create(model="policy", messages=said)
            await client.post(url, body={"response": given.id, "reward": 0.5}, cast_to=object)
            said = [*said, given.choices[0].message, {"role": "user", "content": "Go on."}]
    except APIStatusError:
        await client.post(url, body={"response": given.id, "reward": -1}, cast_to=object)
        raise
    return
