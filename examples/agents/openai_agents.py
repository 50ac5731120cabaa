r"""Agent of the OpenAI Agents SDK (`pip install openai-agents`) that calls tools to find a coin.

    perturn evaluate --model tiny-agent --environment agent environment.tasks=examples/agents/tasks.jsonl \
        "environment.command=[python, examples/agents/openai_agents.py]"

The recipe on the page docs/how-to/agents.md trains it, with this command and these tasks.
"""

import json
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled

PLACES = ("cabinet 1", "drawer 1", "drawer 2", "shelf 1")
task = json.load(sys.stdin)
looked, said = [], []


@function_tool
def go_to(place: str) -> str:
    """Go to a place and look for the coin."""
    looked.append(place)
    return "You find the coin." if place == task["hidden"] else "There is no coin here."


set_tracing_disabled(True)  # traces would go to OpenAI
agent = Agent("finder", instructions="Answer with one action.", tools=[go_to], model="policy")
heard = [{"role": "user", "content": f"You see a {', a '.join(PLACES)}. Your task is to: find the coin."}]
for _ in range(4):
    result = Runner.run_sync(agent, heard, max_turns=4)
    said.append(str(result.final_output))
    heard = [*result.to_input_list(), {"role": "user", "content": "There is no coin here."}]
named = sum(any(place in text for place in PLACES) for text in said)  # a tiny policy calls no tool at first
print(json.dumps({"reward": (task["hidden"] in looked) + 0.1 * named}))
