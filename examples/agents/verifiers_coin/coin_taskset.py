r"""Taskset and harness of verifiers 0.4: find a coin by going to places.

    perturn run recipes/agent-verifiers.yaml
    PYTHONPATH=examples/agents/verifiers_coin vf-eval @ examples/agents/verifiers_coin/test.toml \
        --no-push --client.base-url http://127.0.0.1:8000/v1 --client.api-key-var OPENAI_API_KEY

The harness is a loop of OpenAI's client with one tool. A policy that calls no tool may name a place in its text.
"""

import re
from collections.abc import Iterator
from itertools import permutations

import verifiers.v1 as vf
from openai import AsyncOpenAI

PLACES = ("cabinet 1", "drawer 1", "drawer 2", "shelf 1")
TURNS = 4
FOUND = "You find the coin."
GO = {
    "type": "function",
    "function": {
        "name": "go_to",
        "description": "Go to a place and look for the coin.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}


class CoinData(vf.TaskData):
    """Data of a task, with the place of the coin."""

    hidden: str


class CoinTask(vf.Task[CoinData]):
    """Task to find the coin. Part of the reward is for each answer that names a place."""

    @vf.reward(weight=1.0)
    async def found(self, trace: vf.Trace) -> float:
        """Return 1 if the coin was found, else 0."""
        return float(any(look(self.data.hidden, text) == FOUND for text in texts(trace)))

    @vf.reward(weight=0.1)
    async def named(self, trace: vf.Trace) -> float:
        """Return the number of answers that name a place."""
        return float(sum(any(each in text for each in PLACES) for text in texts(trace)))


class CoinConfig(vf.TasksetConfig):
    """Range of the tasks."""

    first: int = 0
    count: int = 8


class CoinTaskset(vf.Taskset[CoinTask, CoinConfig]):
    """Tasks that name the places in different orders, and hide the coin in the last place."""

    def load(self) -> Iterator[CoinTask]:
        """Yield the tasks."""
        orders = list(permutations(PLACES))
        for number in range(self.config.first, self.config.first + self.config.count):
            *others, hidden = orders[number]
            prompt = f"You see a {', a '.join([*others, hidden])}. Your task is to: find the coin."
            yield CoinTask(CoinData(prompt=prompt, id=f"coin-{number}", hidden=hidden), self.config.task)


class CoinHarness(vf.Harness[vf.HarnessConfig]):
    """Harness that calls the model in this process until the coin is found."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Play an episode."""
        _, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(TURNS):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages, tools=[GO])
                said = answer.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                replies = [
                    {
                        "role": "tool",
                        "tool_call_id": call.id,
                        "content": look(data.hidden, call.function.arguments),
                    }
                    for call in said.tool_calls or ()
                ]
                messages += replies or [{"role": "user", "content": look(data.hidden, said.content or "")}]
                if any(FOUND in each["content"] for each in messages[-len(replies or [1]) :]):
                    break
        return vf.ProgramResult(0, "", "")


def texts(trace: vf.Trace) -> list[str]:
    """Return the text and the tool calls of each answer."""
    said = trace.assistant_messages
    return [
        " ".join([each.content or "", *(call.arguments for call in each.tool_calls or ())]) for each in said
    ]


def look(hidden: str, said: str) -> str:
    """Return the observation after an answer, or after the arguments of a call."""
    place = re.search(r"(cabinet|drawer|shelf) \d", said)
    return FOUND if place is not None and place[0] == hidden else "There is no coin here."


__all__ = ["CoinHarness", "CoinTaskset"]
