"""An engine that asks another for several candidates of each action, and answers with one of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from perturn.errors import EngineFailure
from perturn.types import Action, Engine, Prompt, Sampling, StreamingEngine

Choose = Callable[[Prompt, Sequence[Action]], int]
"""Index of the action that answers a prompt, among its candidates."""

_Answer = Action | EngineFailure


def with_candidates(engine: Engine, samples: int, choose: Choose) -> Engine:
    """Return an engine that chooses among several answers of another engine; it streams if the other one does.

    The candidates of all prompts are asked for together. Each is a separate conversation with its own seed, which
    depends only on the prompt's seed and on its number; the first is the answer that a single sample would give. A
    candidate that fails is left out; where all do, the prompt fails as the first did.

    Args:
        engine: Gives the candidates; it stays the caller's to close.
        samples: Candidates of each prompt.
        choose: Which of them answers; it is given those that did not fail, one at least.
    """
    if isinstance(engine, StreamingEngine):
        return _Streaming(engine, samples, choose)
    return _Together(engine, samples, choose)


class _Together:
    """Of an engine that answers prompts together."""

    def __init__(self, engine: Engine, samples: int, choose: Choose) -> None:
        self.name = engine.name
        self._engine, self._samples, self._choose = engine, samples, choose

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[_Answer]:
        """Return one action a prompt, in order."""
        asked = [each for prompt in prompts for each in _candidates(prompt, self._samples)]
        found = self._engine.generate(asked, sampling)
        each = self._samples
        return [
            _chosen(prompt, found[index * each : (index + 1) * each], self._choose)
            for index, prompt in enumerate(prompts)
        ]

    def forget(self, conversation: str) -> None:
        """Delete the state of a conversation, and of its candidates."""
        for number in range(self._samples):
            self._engine.forget(_conversation(conversation, number))

    def close(self) -> None:
        """Leave the engine open: its owner closes it."""


class _Streaming:
    """Of an engine that takes prompts on while it answers others."""

    def __init__(self, engine: StreamingEngine, samples: int, choose: Choose) -> None:
        self.name = engine.name
        self._engine, self._samples, self._choose = engine, samples, choose
        self._together = _Together(engine, samples, choose)
        self._asked: dict[str, tuple[Prompt, int]] = {}
        self._found: dict[str, dict[int, _Answer]] = {}

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Take prompts on."""
        candidates = []
        for prompt in prompts:
            self._found[prompt.conversation] = {}
            for number, each in enumerate(_candidates(prompt, self._samples)):
                self._asked[each.conversation] = prompt, number
                candidates.append(each)
        self._engine.submit(candidates, sampling)

    def advance(self) -> list[tuple[Prompt, _Answer]]:
        """Return the prompts whose last candidate came, and their answers."""
        done = []
        for candidate, answer in self._engine.advance():
            prompt, number = self._asked.pop(candidate.conversation)
            found = self._found[prompt.conversation]
            found[number] = answer
            if len(found) == self._samples:
                del self._found[prompt.conversation]
                answers = [found[each] for each in range(self._samples)]
                done.append((prompt, _chosen(prompt, answers, self._choose)))
        return done

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[_Answer]:
        """Return one action a prompt, in order."""
        return self._together.generate(prompts, sampling)

    def forget(self, conversation: str) -> None:
        """Delete the state of a conversation, and of its candidates."""
        self._together.forget(conversation)

    def close(self) -> None:
        """Leave the engine open: its owner closes it."""


def _candidates(prompt: Prompt, samples: int) -> list[Prompt]:
    """Return a prompt as often as it is asked; the first time unchanged."""
    more = (
        replace(prompt, seed=_seed(prompt.seed, each), conversation=_conversation(prompt.conversation, each))
        for each in range(1, samples)
    )
    return [prompt, *more]


def _conversation(name: str, number: int) -> str:
    """Return the identity of a candidate's conversation; no episode has such a name, which ends in `#` and digits."""
    return f"{name}~{number}" if number else name


def _seed(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr((seed, number)).encode(), digest_size=6).digest())


def _chosen(prompt: Prompt, answers: Sequence[_Answer], choose: Choose) -> _Answer:
    """Return the answer among a prompt's candidates, which says how many tokens each of these has."""
    given = [one for one in answers if isinstance(one, Action)]
    if not given:
        return answers[0]
    written = tuple(len(one.token_ids or ()) for one in given)
    return replace(given[choose(prompt, given)], candidates=written)
