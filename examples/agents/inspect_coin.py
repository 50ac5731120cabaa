r"""Tasks of inspect-ai: find a coin by going to places, with Inspect's tool calls or by naming places in text.

perturn run recipes/agent-inspect.yaml
inspect eval examples/agents/inspect_coin.py@test --model openai-api/policy/policy \
        --model-base-url http://127.0.0.1:8000/v1
"""

import re
from itertools import permutations

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageUser, execute_tools, get_model
from inspect_ai.scorer import Score, mean, scorer
from inspect_ai.solver import solver
from inspect_ai.tool import tool

PLACES = ("cabinet 1", "drawer 1", "drawer 2", "shelf 1")
TURNS = 4
FOUND, NOTHING = "You find the coin.", "There is no coin here."


def coins(first, count):
    """Return samples. Each names the places in another order, and hides the coin in the last place."""
    return MemoryDataset(
        [
            Sample(
                input=f"You see a {', a '.join(places)}. Your task is to: find the coin.",
                target=places[-1],
                id=f"coin-{first + number}",
            )
            for number, places in enumerate(list(permutations(PLACES))[first : first + count])
        ]
    )


@tool
def go_to():
    """Return the tool."""

    async def execute(place: str):
        """Go to a place and look for the coin.

        Args:
            place: Where to go.
        """
        return f"You are at {place}."

    return execute


def place_in(text):
    """Return the place that a text names; empty if it names none."""
    named = re.search(r"(cabinet|drawer|shelf) \d", text)
    return named[0] if named else ""


@solver
def seek():
    """Ask until the coin is found."""

    async def solve(state, generate):
        model, tools = get_model(), [go_to()]
        for _ in range(TURNS):
            state.output = await model.generate(state.messages, tools=tools)
            said = state.output.message
            state.messages.append(said)
            results, _ = await execute_tools(state.messages, tools)
            if state.target.text in map(place_in, texts([said])):
                break
            state.messages += results or [ChatMessageUser(content=NOTHING)]
        return state

    return solve


def texts(messages):
    """Return the text and the tool calls of each answer of the model."""
    said = [each for each in messages if each.role == "assistant"]
    return [" ".join([each.text, *(str(call.arguments) for call in each.tool_calls or ())]) for each in said]


@scorer(metrics=[mean()])
def coin():
    """Score 1 for the coin, and 0.1 for each answer that names a place."""

    async def score(state, target):
        places = [place_in(text) for text in texts(state.messages)]
        return Score(value=float(target.text in places) + 0.1 * sum(map(bool, places)))

    return score


@task
def train():
    """Return the tasks for training."""
    return Task(coins(0, 8), solver=seek(), scorer=coin())


@task
def test():
    """Return the tasks for scoring."""
    return Task(coins(8, 16), solver=seek(), scorer=coin())
