"""Frameworks that are installed by hand: their calls of tools only append to the conversation."""

import asyncio
import json

import pytest

from perturn.types import Task

CALLS = [{"place": "drawer 1"}, {"place": "shelf 1"}]
SEEN = "There is no coin here."


def script(engine):
    """Let the policy call the tool twice, with a text before the calls, and then end."""
    calls = (
        f"I look.\n<tool_call>\n{json.dumps({'name': 'go_to', 'arguments': each})}\n</tool_call>"
        for each in CALLS
    )
    said = iter([*calls, "It is nowhere."])
    engine.answer = lambda prompt: next(said)


def go_to(place: str) -> str:
    """Go to a place and look for the coin."""
    return SEEN


async def closing(client, answer):
    """Await an answer, then close the client that asks for it."""
    async with client:
        return await answer


def is_append_only(endpoint, session):
    """End the session; check its three turns, of which nothing broke the sequence."""
    assert endpoint.summary(session)["breaks"] == {}
    episode = endpoint.end_session(session, reward=1.0)
    assert episode.is_linear
    assert [[each["content"] for each in turn.observation] for turn in episode.turns[1:]] == [[SEEN], [SEEN]]


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
def test_the_openai_agents_sdk_calls_tools(endpoint, engine, protocol):
    pytest.importorskip("agents.models")  # `tests/agents` is a namespace of the same name
    import agents

    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    script(engine)
    session = endpoint.new_session(Task("coin"))
    client = openai.AsyncOpenAI(base_url=endpoint.url(session), api_key=endpoint.session_key(session))
    model = getattr(agents, protocol)("policy", openai_client=client)
    agent = agents.Agent("finder", instructions="Find it.", tools=[agents.function_tool(go_to)], model=model)

    found = asyncio.run(closing(client, agents.Runner.run(agent, "Where is the coin?")))

    assert found.final_output == "It is nowhere."
    is_append_only(endpoint, session)


@pytest.mark.slow
def test_pydantic_ai_calls_tools(endpoint, engine):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    script(engine)
    session = endpoint.new_session(Task("coin"))
    provider = OpenAIProvider(base_url=endpoint.url(session), api_key=endpoint.session_key(session))
    agent = pydantic_ai.Agent(
        OpenAIChatModel("policy", provider=provider), instructions="Find it.", tools=[go_to]
    )

    found = asyncio.run(closing(provider.client, agent.run("Where is the coin?")))

    assert found.output == "It is nowhere."
    is_append_only(endpoint, session)
