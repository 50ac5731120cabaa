"""The server of a replica, without a cluster: its engine works in a thread, and answers come as they are ready."""

import asyncio

import pytest

from perturn.cluster.node_servers import EngineServer
from perturn.engines.streaming import answer_all
from perturn.errors import EngineFailure
from perturn.types import Action, Prompt, Sampling


def prompt(conversation):
    return Prompt((), (), ({"role": "user", "content": "go"},), seed=0, conversation=conversation)


class Ordered:
    """Answers `slow` once it is told to `go on`, fails on `full`, breaks on `broken`, and answers others at once."""

    name = "ordered"

    def __init__(self, model):
        self.held, self.forgotten, self.goes_on = [], [], False

    def submit(self, prompts, sampling):
        """Hold them."""
        self.held += prompts
        self.goes_on |= any(one.conversation == "go on" for one in prompts)

    def advance(self):
        """Answer those that are ready."""
        if any(one.conversation == "broken" for one in self.held):
            raise RuntimeError("the card fell off")
        ready = [one for one in self.held if one.conversation != "slow" or self.goes_on]
        self.held = [one for one in self.held if one not in ready]
        return [(one, self.answer(one)) for one in ready]

    def answer(self, one):
        """Answer one."""
        return EngineFailure("too long") if one.conversation == "full" else Action(one.conversation)

    def generate(self, prompts, sampling):
        """Answer all."""
        return answer_all(self, prompts, sampling)

    def forget(self, conversation):
        """Note it."""
        self.forgotten.append(conversation)

    def close(self):
        """Nothing is held."""


class Together(Ordered):
    """Answers prompts together alone."""

    submit = advance = None

    def generate(self, prompts, sampling):
        """Answer all."""
        return [self.answer(one) for one in prompts]


async def opened(engine):
    server = EngineServer()
    assert await server.open(engine, "m", {}, "policy@1") == "policy@1"
    return server


async def heard(server, count):
    """The texts of so many answers by their numbers, or the type of a failure."""
    found = {}
    while len(found) < count:
        for number, answer in await server.answers(5.0):
            found[number] = answer.text if isinstance(answer, Action) else type(answer).__name__
    return found


def test_a_prompt_does_not_wait_for_the_answers_of_others():
    async def work():
        server = await opened(Ordered)
        await server.submit([(0, prompt("slow"))], Sampling())
        await server.submit([(1, prompt("a")), (2, prompt("full"))], Sampling())
        first = await heard(server, 2)
        nothing = await server.answers(0.05)
        await server.submit([(3, prompt("go on"))], Sampling())
        return first, nothing, await heard(server, 2)

    first, nothing, then = asyncio.run(work())

    assert first == {1: "a", 2: "EngineFailure"}
    assert nothing == []
    assert then == {0: "slow", 3: "go on"}


def test_an_engine_that_answers_together_is_given_all_that_waits():
    async def work():
        server = await opened(Together)
        await server.submit([(0, prompt("a")), (1, prompt("b"))], Sampling())
        return await heard(server, 2)

    assert asyncio.run(work()) == {0: "a", 1: "b"}


def test_what_an_engine_raises_is_raised_to_who_waits():
    async def work():
        server = await opened(Ordered)
        await server.submit([(0, prompt("broken"))], Sampling())
        await server.answers(5.0)

    with pytest.raises(RuntimeError, match="the card fell off"):
        asyncio.run(work())


def test_a_conversation_is_forgotten_in_the_order_of_the_calls():
    async def work():
        server = await opened(Ordered)
        await server.submit([(0, prompt("a"))], Sampling())
        await heard(server, 1)
        await server.forget("a")
        await server.submit([(1, prompt("b"))], Sampling())
        await heard(server, 1)
        return server._engine.forgotten

    assert asyncio.run(work()) == ["a"]
