r"""Smolagents agent that calls tools to find a coin.

    perturn evaluate --model tiny-agent --environment agent environment.tasks=examples/agents/tasks.jsonl \
        "environment.command=[python, examples/agents/smolagents_tools.py]"

The recipe on the page docs/how-to/agents.md trains it, with this command and these tasks.
"""

import json
import os
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

PLACES = ("cabinet 1", "drawer 1", "drawer 2", "shelf 1")
task = json.load(sys.stdin)
looked = []


@tool
def go_to(place: str) -> str:
    """Go to a place and look for the coin.

    Args:
        place: Where to go.
    """
    looked.append(place)
    return "You find the coin." if place == task["hidden"] else "There is no coin here."


address, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
model = OpenAIServerModel("policy", api_base=address, api_key=key)
agent = ToolCallingAgent(tools=[go_to], model=model, max_steps=4, verbosity_level=0)
agent.run(
    f"You are in the middle of a room. You see a {', a '.join(PLACES)}. Your task is to: find the coin."
)
said = [str(step.model_output) for step in agent.memory.steps if hasattr(step, "model_output")]
named = sum(any(place in text for place in PLACES) for text in said)  # a tiny policy calls no tool at first
print(json.dumps({"reward": (task["hidden"] in looked) + 0.1 * named}))
