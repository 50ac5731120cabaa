"""Support for `async def` methods of environments: each environment object has one event loop in a thread of its own.

The loop lasts as long as the object, so a connection that one call opens is still open in the next call. The thread
that plays episodes blocks until each call returns. That thread may itself run an event loop, as in a notebook.
"""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import wraps
from typing import Any, cast

from perturn.engines.event_loop import EventLoop
from perturn.errors import WorldLost
from perturn.types import Environment

_CORE = ("tasks", "reset", "step", "close")
"""Methods that are also looked up on the object itself, since they may be attributes of the object alone."""


_CANCELLED = (
    "the environment's event loop was cancelled: a background task of the environment failed, such as the reader of a "
    "connection in a TaskGroup. Handle its exceptions in the environment."
)

Calls = asyncio.Queue[tuple[Awaitable[Any], "Future[Any]"]]


class WorldLoop:
    """The event loop of one environment object.

    The first coroutine starts the loop. The loop ends with `close`, or when this object is garbage-collected. All
    coroutines run one after the other in a single asyncio task. So `close` may exit a context that `reset` entered,
    such as the session of an MCP client, and context variables keep their values.
    """

    def __init__(self) -> None:
        self._loop: EventLoop | None = None

    def result(self, value: Any) -> Any:
        """Return a value. An awaitable is awaited first, and an asynchronous generator is collected into a list.

        An exception of the coroutine is raised here.

        Raises:
            WorldLost: If the loop's task was cancelled, such as by a `TaskGroup` of the environment when one of its
                other tasks failed. The next coroutine starts a new loop.
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
            wait({answer, self._served}, return_when=FIRST_COMPLETED)
            if not answer.done():
                if inspect.iscoroutine(value):
                    value.close()  # it may not have begun
                raise WorldLost(_CANCELLED)
            return answer.result()
        finally:
            if (
                not answer.done() or self._served.done()
            ):  # or the caller was interrupted while the coroutine runs
                self.close()

    def close(self) -> None:
        """End the loop and cancel its running tasks. The next coroutine starts a new loop."""
        loop, self._loop = self._loop, None
        if loop is not None:
            self._ended.detach()
            loop.close()

    def _begin(self) -> None:
        self._loop = EventLoop("perturn-world")
        self._calls: Calls = asyncio.Queue()
        self._served = self._loop.start(_serve(self._calls))
        self._ended = weakref.finalize(self, self._loop.stop)


async def _serve(calls: Calls) -> None:
    """Await one call after the other until the loop ends.

    Every exception of a call is passed to the caller, also `SystemExit`: otherwise it would end this task. If the task
    itself is cancelled, it ends, which the caller notices.
    """
    while True:
        work, answer = await calls.get()
        try:
            found = await work
        except BaseException as error:  # an environment is user code and may raise anything
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            answer.set_exception(error)
        else:
            answer.set_result(found)


async def _all_of(found: AsyncIterator[Any]) -> list[Any]:
    return [each async for each in found]


class AwaitedWorld:
    """An environment with `async def` methods, wrapped so that each call blocks until its result is there."""

    def __init__(self, world: Any, loop: WorldLoop) -> None:
        self._world, self._loop = world, loop

    def __getattr__(self, name: str) -> Any:
        if name in ("_world", "_loop"):  # copy.copy reads attributes before __init__ has run
            raise AttributeError(name)
        found = getattr(self._world, name)
        return self._waiting(found) if callable(found) else found

    @property
    def played(self) -> Any:
        """The wrapped environment, with its `async def` methods."""
        return self._world

    def close(self) -> None:
        """Close the environment if it has a method `close`, and then end its loop."""
        close = getattr(self._world, "close", None)
        try:
            if close is not None:
                self._loop.result(close())
        finally:
            self._loop.close()

    def _waiting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a plain method that awaits the result of an `async def` method."""

        @wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            return self._loop.result(method(*arguments, **named))

        return call


def awaited(made: Any) -> Environment:
    """Return an environment whose `async def` methods are wrapped in plain methods.

    An environment without `async def` methods is returned unchanged, and so is an environment that is already wrapped.

    Args:
        made: The environment, or the coroutine that an `async def` factory returned.
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
    """Return whether any method of an environment is asynchronous."""
    own = [name for name in dir(type(world)) if not name.startswith("_")]
    methods = [inspect.getattr_static(type(world), name, None) for name in own]
    methods += [getattr(world, name, None) for name in _CORE]
    return any(map(_returns_awaitable, methods))


def _returns_awaitable(method: Any) -> bool:
    """Return whether a method was written with `async def`; decorators are unwrapped."""
    if isinstance(method, staticmethod | classmethod):
        method = method.__func__
    if not callable(method):
        return False
    functions = (method, inspect.unwrap(method))
    return any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in functions)
