"""An adapter of a library that has words to say; it must run without Perturn and without torch."""

import sys

WORDS = ("alpha", "beta")


def tasks(source):
    """List a task for each word of a set."""
    print("loading", source)  # libraries do
    if source == "broken":
        raise ValueError("there is no such set of words")
    return [{"id": f"{source}/{word}", "word": word} for word in WORDS]


async def rollout(task, client):
    """Say the word; the reward is for an interpreter that has nothing of Perturn."""
    said = [{"role": "user", "content": task["word"]}]
    await client.chat.completions.create(model="policy", messages=said)
    if task["word"] == "beta":
        raise RuntimeError("a bug in the library")
    return float(not {"perturn", "torch"} & set(sys.modules))
