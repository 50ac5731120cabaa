"""One engine for several concurrent rollouts, whose weights can be replaced while the rollouts continue."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from queue import SimpleQueue

from perturn.engines.engine_thread import Answered, EngineThread
from perturn.engines.protocol import SwappingEngine
from perturn.engines.streaming import answer_all, take_all
from perturn.episodes.engine_abilities import EngineAbilities, abilities_of
from perturn.errors import EngineFailure
from perturn.types import Action, Prompt, Sampling

_MOMENT_S = 0.003
"""Seconds that `advance` waits for an answer, before the rollout steps its environments again."""


class _Own(Mapping[str, int]):
    """View of a mapping by conversation: one port's conversations alone, with names without the port's prefix."""

    def __init__(self, prefix: str, numbers: Mapping[str, int]) -> None:
        self._prefix, self._numbers = prefix, numbers

    def __getitem__(self, conversation: str) -> int:
        return self._numbers[self._prefix + conversation]

    def __iter__(self) -> Iterator[str]:
        own = (each for each in list(self._numbers) if each.startswith(self._prefix))
        return (each.removeprefix(self._prefix) for each in own)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Ended(Exception):
    """Raised by a port after the shared engine was closed."""


class SharedEngine:
    """Gives each rollout a port, which acts as an engine; the prompts of all ports join one batch."""

    def __init__(self, engine: SwappingEngine) -> None:
        """Start the engine's thread; until `close`, only this thread may call the engine, which stays open."""
        self._engine = engine
        self._ended = threading.Event()
        self._asked: dict[str, tuple[Port, Prompt]] = {}
        self._numbers = count()
        self._thread = EngineThread(engine, self._deliver)

    def port(self, name: str = "") -> Port:
        """Return a port for one rollout.

        Args:
            name: Name of the port; empty: the name of the policy that is served now. A swap does not change it.
        """
        prefix, abilities = f"{next(self._numbers)}/", abilities_of(self._engine)
        asked, said = (_Own(prefix, each) for each in (abilities.prompt_tokens, abilities.answer_tokens))
        own = replace(abilities, concurrent_calls=0, prompt_tokens=asked, answer_tokens=said)
        return Port(self, prefix, name or self._engine.name, own)

    def swap(self, folder: str | Path, name: str, version: int, base: str | None = None) -> None:
        """Replace the engine's weights between two of its passes, while answers are being generated.

        Args:
            folder: Folder that `save_pretrained` wrote.
            name: Name of the new policy.
            version: Version of the new weights.
            base: Folder of the base model, if `folder` holds only adapters; None: `folder` holds a whole model.

        Raises:
            PerturnError: If the weights cannot be read.
        """
        more = {} if base is None else {"base": base}
        self._thread.call(lambda: self._engine.swap_weights(folder, name, version, **more)).result()

    def close(self) -> None:
        """End the thread; from then on the ports raise `Ended`."""
        self._ended.set()
        self._thread.close()

    def submit(self, port: Port, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Start answering the prompts of a port; the port's prefix makes the names of its conversations unique."""
        self.refuse_ended()
        for prompt in prompts:
            ours = replace(prompt, conversation=port.prefix + prompt.conversation)
            self._asked[ours.conversation] = port, prompt
            self._thread.submit(ours, sampling)

    def forget(self, conversation: str) -> None:
        """Delete the state of a conversation that has ended."""
        self._thread.forget(conversation)

    def refuse_ended(self) -> None:
        """Raise `Ended` if the engine no longer answers."""
        if self._ended.is_set():
            raise Ended("the engine is closed")

    def _deliver(self, answers: Sequence[tuple[Prompt, Answered]]) -> None:
        for ours, answer in answers:
            port, prompt = self._asked.pop(ours.conversation)
            port.answers.put((prompt, answer))


class Port:
    """A streaming engine for one rollout, in any thread; two ports may use equal names of conversations."""

    def __init__(self, shared: SharedEngine, prefix: str, name: str, abilities: EngineAbilities) -> None:
        """Make a port; call `SharedEngine.port` instead."""
        self._shared, self.prefix, self.name, self.abilities = shared, prefix, name, abilities
        self.answers: SimpleQueue[tuple[Prompt, Answered]] = SimpleQueue()

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Start answering prompts; `advance` returns their answers."""
        self._shared.submit(self, prompts, sampling)

    def advance(self) -> list[tuple[Prompt, Action | EngineFailure]]:
        """Wait a few milliseconds; return the prompts that were answered, with their answers.

        Raises:
            Ended: If the shared engine was closed.
            Exception: Any exception that the engine raised.
        """
        self._shared.refuse_ended()
        answered: list[tuple[Prompt, Action | EngineFailure]] = []
        for prompt, answer in take_all(self.answers, _MOMENT_S):
            if not isinstance(answer, Action | EngineFailure):
                raise answer
            answered.append((prompt, answer))
        return answered

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Action | EngineFailure]:
        """Return one action or failure per prompt, in order."""
        return answer_all(self, prompts, sampling)

    def forget(self, conversation: str) -> None:
        """Release the state of a conversation."""
        self._shared.forget(self.prefix + conversation)

    def close(self) -> None:
        """Do nothing: the shared engine stays open."""
