r"""Agent that finds a coin with OpenAI's client in a loop (`pip install openai`).

    perturn evaluate --model tiny-agent --environment agent environment.tasks=examples/agents/tasks.jsonl \
        "environment.command=[python, examples/agents/openai_client.py]"

`recipes/agent-coin.yaml` trains this agent, and the agents of smolagents and LangGraph, with these tasks.
"""

import json
import sys

from openai import OpenAI

PLACES = ("cabinet 1", "drawer 1", "drawer 2", "shelf 1")
task = json.load(sys.stdin)
client, said = OpenAI(), []
heard = [{"role": "user", "content": f"You see a {', a '.join(PLACES)}. Your task is to: find the coin."}]
for _ in range(4):
    answer = client.chat.completions.create(model="policy", messages=heard)
    said.append(answer.choices[0].message.content)
    if f"go to {task['hidden']}" in said[-1]:
        break
    heard += [
        {"role": "assistant", "content": said[-1]},
        {"role": "user", "content": "There is no coin here."},
    ]
named = sum(any(place in text for place in PLACES) for text in said)
print(json.dumps({"reward": (f"go to {task['hidden']}" in said[-1]) + 0.1 * named}))
