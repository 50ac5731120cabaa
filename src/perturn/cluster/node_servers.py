"""Servers that run on a cluster's nodes: one for a node's environments, and one for a replica of the policy.

Both are plain classes, from which the driver makes Ray actors. They have no access to the driver's files.
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
from perturn.envs.remote_worlds import PlainWorld, error_reply
from perturn.envs.world_process import ProcessWorlds, runs_here, world_count
from perturn.errors import EngineFailure
from perturn.io.scratch import scratch_folder
from perturn.types import Action, Engine, Environment, Prompt, Sampling

Reply = dict[str, Any]
"""Result of a call: `value`, in plain data, or `error` and `text` of the exception that it raised."""


class WorldServer:
    """Server of all environments of a node; each environment has a thread of its own."""

    def __init__(self, section: Section, limits: Worlds) -> None:
        self._section, self._limits = section, limits
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._worlds: dict[int, PlainWorld] = {}

    def identity(self) -> str:
        """Return the identity of perturn's installation on this node."""
        return identity()

    def start(self, most: int) -> Reply:
        """Start a first environment.

        Args:
            most: Number of environments that the driver needs.

        Returns:
            Properties of the environment, and `capacity`: the number of environments that this node may run.
        """
        return _reply(partial(self._start, most))

    def _start(self, most: int) -> dict[str, Any]:
        self._make: Callable[[], Environment]
        if runs_here(self._section, self._limits):
            self._make = environment_maker(self._section)
            world = self._make()
            facts = PlainWorld(world).facts()
            world.close()  # environments belong to the threads of their slots
        else:
            self._make = worlds = ProcessWorlds(self._section, self._limits)
            facts = worlds.facts
        return facts | {"capacity": world_count(self._section, self._limits, most)}

    def call(self, slot: int, method: str, *arguments: Any) -> Reply:
        """Call a method of the environment in a slot; the first call of a slot creates its environment."""
        thread = self._threads.setdefault(slot, ThreadPoolExecutor(1))
        return thread.submit(_reply, partial(self._call, slot, method, *arguments)).result()

    def close(self, slot: int) -> Reply:
        """Close the environment in a slot, and free the slot."""
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
    except BaseException as error:  # noqa: BLE001  an environment may raise anything, and may call sys.exit
        return error_reply(error)


Answer = Action | EngineFailure
Serve = Callable[[str], Engine]
"""Function that opens the engine of a model; every node must be able to import it."""


class EngineServer:
    """Server of a replica of the policy, whose engine runs in its own thread, so that prompts can join at any time.

    The methods are coroutines. One event loop runs them in the order of the calls.
    """

    def __init__(self) -> None:
        self._asked: dict[int, tuple[int, Prompt]] = {}
        self._answers: list[tuple[int, Answer]] = []
        self._error: Exception | None = None
        self._told = asyncio.Event()

    async def identity(self) -> tuple[str, str]:
        """Return the name of this machine, and the identity of perturn's installation."""
        return socket.gethostname(), identity()

    async def open(self, serve: Serve, model: str, files: dict[str, Any], name: str | None = None) -> str:
        """Open the engine of the policy.

        Args:
            serve: Function that opens the engine of a model.
            model: Hub id of the model; used if there are no files.
            files: References to the bytes of the model's files, by file name.
            name: Name of the policy; None: the name that `serve` gives it.

        Returns:
            Name of the policy.
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
        """Replace the weights by other weights of the same model; see `open` for the arguments."""
        engine: Any = self._engine

        def update() -> None:
            with _folder_of(files) as folder:
                engine.update_weights(folder, name)

        await asyncio.wrap_future(self._thread.call(update))
        return self._engine.name

    async def submit(self, prompts: Sequence[tuple[int, Prompt]], sampling: Sampling) -> None:
        """Start answering prompts. Each prompt comes with the number of its later answer."""
        for number, prompt in prompts:
            self._asked[id(prompt)] = number, prompt  # keep the prompt, so that its id stays unique
            self._thread.submit(prompt, sampling)

    async def answers(self, seconds: float) -> list[tuple[int, Answer]]:
        """Wait up to `seconds` for an answer; return all answers since the last call, with their numbers.

        Raises:
            Exception: Any exception that the engine raised.
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
    """Write files, given as references to their bytes by name, to a temporary folder, and yield its path."""
    get = importlib.import_module("ray").get
    with scratch_folder() as folder:
        for name, data in files.items():
            with (Path(folder) / name).open("wb") as file:
                file.write(get(data).data)
        yield folder
