"""Worlds with `async def` methods, for tests; each keeps a connection, which a loop other than its own cannot use."""

import asyncio
import contextvars
import functools
import sys

from perturn.types import Observation, Task


class Line:
    """A connection: an echo in the background of the loop that opened it."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.asked, self.answers = asyncio.Queue(), asyncio.Queue()
        self.task = asyncio.create_task(self._echo())
        self.beats = 0

    async def _echo(self):
        while True:
            self.beats += 1
            await self.answers.put(await self.asked.get())

    async def send(self, text):
        """The same text, if it is asked in its own loop."""
        assert asyncio.get_running_loop() is self.loop, "another loop"
        await self.asked.put(text)
        return await asyncio.wait_for(self.answers.get(), 5)


GREETING: contextvars.ContextVar[str] = contextvars.ContextVar("greeting")
"""Set in reset, read in step."""


class Async:
    """Three words solve the task; `crash`, `exit` and `hang` do as they say."""

    name = "async-1"
    closed = 0

    def __init__(self, size=2):
        self.size, self.line = size, None

    async def tasks(self, split):
        """So many."""
        await asyncio.sleep(0)
        return [Task(f"{split}/{i}", split=split) for i in range(self.size)]

    async def reset(self, task, seed):
        """Open the connection, once."""
        self.said = 0
        self.line = self.line or Line()
        GREETING.set("begin")
        self.task = asyncio.current_task()
        return Observation(await self.line.send("begin"))

    async def step(self, action):
        """The connection's answer."""
        if action == "crash":
            raise RuntimeError("fell over")
        if action == "exit":
            sys.exit("left")
        if action == "hang":
            await asyncio.sleep(1000)
        assert (GREETING.get(), asyncio.current_task()) == ("begin", self.task)
        self.said += 1
        over = self.said == 3
        return Observation(await self.line.send(action), 0.5, over, over)

    async def expert(self, task):
        """Three words."""
        return ["one", "two", "three"]

    async def close(self):
        """In the loop of the connection."""
        Async.closed += 1
        if self.line is not None:
            await self.line.send("bye")


async def make(size=2):
    """A factory that is a coroutine itself."""
    await asyncio.sleep(0)
    return Async(size)


def decorated(function):
    """A wrapper that is no `async def`."""

    @functools.wraps(function)
    def wrapper(*arguments):
        return function(*arguments)

    return wrapper


class Decorated(Async):
    """Its methods are behind a decorator."""

    tasks, reset, step, close = map(decorated, (Async.tasks, Async.reset, Async.step, Async.close))


class Yielding(Async):
    """Its tasks are an asynchronous generator."""

    async def tasks(self, split):
        """So many."""
        for i in range(self.size):
            yield Task(f"{split}/{i}", split=split)


class Forgotten:
    """No method is `async def`, and step returns a coroutine all the same."""

    name = "forgotten-1"

    def tasks(self, split):
        """One."""
        return [Task("t", split=split)]

    def reset(self, task, seed):
        """Nothing."""
        return Observation("begin")

    def step(self, action):
        """Not awaited."""
        return self._step(action)

    async def _step(self, action):
        return Observation("never")

    def close(self):
        """Nothing is held."""


class Gym:
    """Gymnasium's interface, asynchronous."""

    async def reset(self, *, seed):
        """Open the connection."""
        self.line = Line()
        return await self.line.send("begin"), {}

    async def step(self, action):
        """The connection's answer."""
        return await self.line.send(action), 1.0, True, False, {}

    async def close(self):
        """In the loop of the connection."""
        await self.line.send("bye")


class Tools:
    """A class for TRL's `environment_factory` that keeps a connection between its calls."""

    async def reset(self, **row):
        """Open the connection."""
        self.line, self.calls = Line(), 0

    async def ask(self, text: str) -> str:
        """Ask the connection.

        Args:
            text: What to ask.
        """
        self.calls += 1
        if text == "crash":
            raise ValueError("no such thing")
        return await self.line.send(text)

    async def get_reward(self) -> float:
        """One for two calls."""
        return float(self.calls >= 2)
