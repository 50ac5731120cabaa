"""Servers on the nodes: of a node's worlds, and of one replica of the policy.

Plain classes; the driver makes actors of them. They know nothing of each other and of the driver's files.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from perturn.cluster.ray_connection import identity
from perturn.config.sections import Section, Worlds
from perturn.engines.engine_thread import Answered, EngineThread
from perturn.envs.load_environment import environment_maker
from perturn.envs.remote_worlds import PlainWorld, told
from perturn.envs.world_process import ProcessWorlds, runs_here, world_count
from perturn.errors import EngineFailure
from perturn.io.scratch import scratch_folder
from perturn.types import Action, Engine, Environment, Prompt, Sampling

Reply = dict[str, Any]
"""`value`: the result of a call, in plain data; or `error` and `text`: the exception it raised."""


class WorldServer:
    """All worlds of one node. Each is called from one thread of its own, as many at a time as there are calls."""

    def __init__(self, section: Section, limits: Worlds) -> None:
        self._section, self._limits = section, limits
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._worlds: dict[int, PlainWorld] = {}

    def identity(self) -> str:
        """Return which perturn is here."""
        return identity()

    def start(self, most: int) -> Reply:
        """Start a first world: its facts, and how many of `most` worlds may live here."""
        return _reply(partial(self._start, most))

    def _start(self, most: int) -> dict[str, Any]:
        self._make: Callable[[], Environment]
        if runs_here(self._section, self._limits):
            self._make = environment_maker(self._section)
            world = self._make()
            facts = PlainWorld(world).facts()
            world.close()  # a world lives in the thread of its slot
        else:
            self._make = worlds = ProcessWorlds(self._section, self._limits)
            facts = worlds.facts
        return facts | {"capacity": world_count(self._section, self._limits, most)}

    def call(self, slot: int, method: str, *arguments: Any) -> Reply:
        """Call a method of the world in a slot; there is a world in each slot that is called."""
        thread = self._threads.setdefault(slot, ThreadPoolExecutor(1))
        return thread.submit(_reply, partial(self._call, slot, method, *arguments)).result()

    def close(self, slot: int) -> Reply:
        """Close the world in a slot, and free the slot."""
        reply = self.call(slot, "close") if slot in self._worlds else {"value": None}
        self._worlds.pop(slot, None)
        if thread := self._threads.pop(slot, None):
            thread.shutdown(wait=False)
        return reply

    def _call(self, slot: int, method: str, *arguments: Any) -> Any:
        if slot not in self._worlds:
            self._worlds[slot] = PlainWorld(self._make())
        return getattr(self._worlds[slot], method)(*arguments)


def _reply(work: Callable[[], Any]) -> Reply:
    try:
        return {"value": work()}
    except BaseException as error:  # noqa: BLE001  the code of others, which may also call sys.exit
        return told(error)


Answer = Action | EngineFailure
Serve = Callable[[str], Engine]
"""Makes the engine of a model; a function that can be imported on a node."""


class EngineServer:
    """One replica of the policy, whose engine works in its own thread: a prompt never waits for others' answers.

    Its methods are coroutines, which one event loop runs in the order in which they are called.
    """

    def __init__(self) -> None:
        self._asked: dict[int, tuple[int, Prompt]] = {}
        self._answers: list[tuple[int, Answer]] = []
        self._error: Exception | None = None
        self._told = asyncio.Event()

    async def identity(self) -> tuple[str, str]:
        """Name of this machine, and which perturn is here."""
        return socket.gethostname(), identity()

    async def open(self, serve: Serve, model: str, files: dict[str, Any], name: str | None = None) -> str:
        """Load the policy: by the name of its model, or from files; these are references to bytes, by name.

        Returns:
            Identity of the policy: the given name, or the name that `serve` gives it.
        """

        def load() -> Engine:
            with _folder_of(files) as folder:
                return serve(folder if files else model)

        loop = asyncio.get_running_loop()
        self._engine = engine = await loop.run_in_executor(None, load)
        engine.name = name or engine.name

        def deliver(answered: Sequence[tuple[Prompt, Answered]]) -> None:
            loop.call_soon_threadsafe(self._arrived, answered)

        self._thread = EngineThread(engine, deliver)
        return engine.name

    async def update_weights(self, files: dict[str, Any], name: str) -> str:
        """Serve other weights of the same model from now on; see `open`."""
        engine: Any = self._engine

        def update() -> None:
            with _folder_of(files) as folder:
                engine.update_weights(folder, name)

        await asyncio.wrap_future(self._thread.call(update))
        return self._engine.name

    async def submit(self, prompts: Sequence[tuple[int, Prompt]], sampling: Sampling) -> None:
        """Take prompts on, each with the number that its answer will have."""
        for number, prompt in prompts:
            self._asked[id(prompt)] = number, prompt  # held, so that no other gets its id
            self._thread.submit(prompt, sampling)

    async def answers(self, seconds: float) -> list[tuple[int, Answer]]:
        """Wait for answers, for so long; return those that have come since the last call.

        Raises:
            Exception: What the engine raised.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._told.wait()
        self._told.clear()
        if self._error is not None:
            raise self._error
        found, self._answers = self._answers, []
        return found

    async def forget(self, conversation: str) -> None:
        """Delete the state of a conversation that has ended."""
        self._thread.forget(conversation)

    def _arrived(self, answered: Sequence[tuple[Prompt, Answered]]) -> None:
        for prompt, answer in answered:
            number, _ = self._asked.pop(id(prompt))
            if isinstance(answer, Answer):
                self._answers.append((number, answer))
            else:
                self._error = answer
        self._told.set()


@contextmanager
def _folder_of(files: dict[str, Any]) -> Iterator[str]:
    """Yield a temporary folder that holds the files."""
    get = importlib.import_module("ray").get
    with scratch_folder() as folder:
        for name, data in files.items():
            with (Path(folder) / name).open("wb") as file:
                file.write(get(data).data)
        yield folder
