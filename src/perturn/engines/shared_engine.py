"""One engine for several plays at the same time, whose weights can be replaced while they go on."""

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
"""Seconds to wait for an answer before a play looks at its worlds again."""


class _Own(Mapping[str, int]):
    """Numbers of the conversations of one port, by their names there."""

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
    """The engine no longer answers, because the work that it was shared for is over."""


class SharedEngine:
    """Gives each play a port, which acts as an engine; all prompts join one batch, in a thread."""

    def __init__(self, engine: SwappingEngine) -> None:
        """Start the thread. The engine stays open when it ends, and only the thread calls it until then."""
        self._engine = engine
        self._ended = threading.Event()
        self._asked: dict[str, tuple[Port, Prompt]] = {}
        self._numbers = count()
        self._thread = EngineThread(engine, self._deliver)

    def port(self, name: str = "") -> Port:
        """Return a port for one play, named as given or after the policy that is served now; it keeps its name."""
        prefix, abilities = f"{next(self._numbers)}/", abilities_of(self._engine)
        asked, said = (_Own(prefix, each) for each in (abilities.prompt_tokens, abilities.answer_tokens))
        own = replace(abilities, concurrent=False, prompt_tokens=asked, answer_tokens=said)
        return Port(self, prefix, name or self._engine.name, own)

    def swap(self, folder: str | Path, name: str, version: int, base: str | None = None) -> None:
        """Have the engine go over to other weights between two of its passes, in the middle of answers.

        Raises:
            PerturnError: If the weights cannot be read.
        """
        more = {} if base is None else {"base": base}
        self._thread.call(lambda: self._engine.swap_weights(folder, name, version, **more)).result()

    def close(self) -> None:
        """End the thread; plays that go on get an `Ended`."""
        self._ended.set()
        self._thread.close()

    def submit(self, port: Port, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Take prompts on; only a port calls this. A conversation is known by its port too."""
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
    """A streaming engine for one play, from any thread; conversations may be named as in other ports."""

    def __init__(self, shared: SharedEngine, prefix: str, name: str, abilities: EngineAbilities) -> None:
        """Make a share of the engine; only `SharedEngine` does so."""
        self._shared, self.prefix, self.name, self.abilities = shared, prefix, name, abilities
        self.answers: SimpleQueue[tuple[Prompt, Answered]] = SimpleQueue()

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Take prompts on."""
        self._shared.submit(self, prompts, sampling)

    def advance(self) -> list[tuple[Prompt, Action | EngineFailure]]:
        """Wait for a moment; the prompts that were answered, and their answers. What the engine raises is raised."""
        self._shared.refuse_ended()
        answered: list[tuple[Prompt, Action | EngineFailure]] = []
        for prompt, answer in take_all(self.answers, _MOMENT_S):
            if not isinstance(answer, Action | EngineFailure):
                raise answer
            answered.append((prompt, answer))
        return answered

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Action | EngineFailure]:
        """Return one action a prompt, when all are answered."""
        return answer_all(self, prompts, sampling)

    def forget(self, conversation: str) -> None:
        """Release the state of a conversation."""
        self._shared.forget(self.prefix + conversation)

    def close(self) -> None:
        """Hold nothing: the engine is shared."""
