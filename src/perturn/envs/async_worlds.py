"""`async def` in environments: one event loop for the life of a world, in its own thread.

So a connection or a task that one call begins is open in the next. The thread that plays the world waits for each call.
It needs no loop of its own, and may have one, as in a notebook.
"""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from functools import wraps
from typing import Any, cast

from perturn.engines.event_loop import EventLoop
from perturn.types import Environment

_CORE = ("tasks", "reset", "step", "close")
"""Methods that a world has, in its class or not."""


Calls = asyncio.Queue[tuple[Awaitable[Any], "Future[Any]"]]


class WorldLoop:
    """The event loop of a world, which begins with the first coroutine and ends with `close`, or with its owner.

    All coroutines run in one task, one after the other. So `close` may leave a context that `reset` has entered, such
    as the session of an MCP client, and a context variable keeps its value.
    """

    def __init__(self) -> None:
        self._loop: EventLoop | None = None

    def result(self, value: Any) -> Any:
        """Return a value, awaited if it is awaitable.

        An asynchronous generator gives the list of its values. What a coroutine raises is raised here.
        """
        if inspect.isasyncgen(value):
            value = _all_of(value)
        if not inspect.isawaitable(value):
            return value
        answer: Future[Any] = Future()
        try:
            if self._loop is None:
                self._begin()
            assert self._loop is not None
            self._loop.run(self._calls.put((value, answer)))
            return answer.result()
        finally:
            if not answer.done():  # the caller was interrupted, and the call goes on
                self.close()

    def close(self) -> None:
        """End the loop; its running tasks are cancelled. The next coroutine begins another."""
        loop, self._loop = self._loop, None
        if loop is not None:
            self._ended.detach()
            loop.close()

    def _begin(self) -> None:
        self._loop = EventLoop("perturn-world")
        self._calls: Calls = asyncio.Queue()
        self._loop.start(_serve(self._calls))
        self._ended = weakref.finalize(self, self._loop.stop)


async def _serve(calls: Calls) -> None:
    """Await one call after the other, until the loop ends.

    What a call raises goes to its caller. A `SystemExit` that passed would end the loop, and its caller would wait.
    """
    while True:
        work, answer = await calls.get()
        try:
            found = await work
        except BaseException as error:  # environments are code of others
            answer.set_exception(error)
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
        else:
            answer.set_result(found)


async def _all_of(found: AsyncIterator[Any]) -> list[Any]:
    return [each async for each in found]


class AwaitedWorld:
    """A world with `async def` methods, used like one without: each call waits for its result."""

    def __init__(self, world: Any, loop: WorldLoop) -> None:
        self._world, self._loop = world, loop

    def __getattr__(self, name: str) -> Any:
        if name in ("_world", "_loop"):  # before __init__, as in a copy
            raise AttributeError(name)
        found = getattr(self._world, name)
        return self._waiting(found) if callable(found) else found

    @property
    def played(self) -> Any:
        """The world with its `async def` methods."""
        return self._world

    def close(self) -> None:
        """Close the world, if it can be closed, and then end its loop."""
        close = getattr(self._world, "close", None)
        try:
            if close is not None:
                self._loop.result(close())
        finally:
            self._loop.close()

    def _waiting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that returns the awaited result."""

        @wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            return self._loop.result(method(*arguments, **named))

        return call


def awaited(made: Any) -> Environment:
    """Return a world that a class or a factory made, with plain methods around its `async def` methods.

    A world without such methods is returned unchanged; so is a world that this function has returned before.

    Args:
        made: The world, or the coroutine of a factory that is an `async def` itself.
    """
    if isinstance(made, AwaitedWorld):
        return cast(Environment, made)
    loop = WorldLoop()
    try:
        world = loop.result(made)
    except BaseException:
        loop.close()
        raise
    if world is made and not _is_async(world):
        return cast(Environment, world)
    return cast(Environment, AwaitedWorld(world, loop))


def _is_async(world: Any) -> bool:
    """Return whether a method of a world is asynchronous."""
    own = [name for name in dir(type(world)) if not name.startswith("_")]
    methods = [inspect.getattr_static(type(world), name, None) for name in own]
    methods += [getattr(world, name, None) for name in _CORE]
    return any(map(_returns_awaitable, methods))


def _returns_awaitable(method: Any) -> bool:
    """Return whether it is a function written with `async def`, decorated or not."""
    if isinstance(method, staticmethod | classmethod):
        method = method.__func__
    if not callable(method):
        return False
    functions = (method, inspect.unwrap(method))
    return any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in functions)
