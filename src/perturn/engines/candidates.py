"""An engine that samples several candidate actions from another engine, and answers with a chosen candidate."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from perturn.errors import EngineFailure
from perturn.types import Action, Engine, Prompt, Sampling, StreamingEngine

Choose = Callable[[Prompt, Sequence[Action]], int]
"""Function that returns the index of the candidate with which a prompt is answered."""

_Answer = Action | EngineFailure


def with_candidates(engine: Engine, samples: int, choose: Choose) -> Engine:
    """Return an engine that chooses among several answers of another engine.

    The returned engine streams if the other engine does. The candidates of all prompts are sampled in one batch. Each
    candidate is a separate conversation, whose seed depends only on the prompt's seed and the candidate's number. The
    first candidate equals the answer without this wrapper. Failed candidates are ignored. If all candidates of a
    prompt fail, the prompt fails with the first candidate's failure.

    Args:
        engine: Engine that samples the candidates; the caller closes it.
        samples: Number of candidates for each prompt.
        choose: Function that chooses among the candidates that did not fail; it gets at least one candidate.
    """
    if isinstance(engine, StreamingEngine):
        return _Streaming(engine, samples, choose)
    return _Together(engine, samples, choose)


class _Together:
    """Chooses among candidates of an engine that answers prompts in batches."""

    def __init__(self, engine: Engine, samples: int, choose: Choose) -> None:
        self.name = engine.name
        self._engine, self._samples, self._choose = engine, samples, choose

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[_Answer]:
        """Return one action or failure per prompt, in order."""
        asked = [each for prompt in prompts for each in _candidates(prompt, self._samples)]
        found = self._engine.generate(asked, sampling)
        each = self._samples
        return [
            _chosen(prompt, found[index * each : (index + 1) * each], self._choose)
            for index, prompt in enumerate(prompts)
        ]

    def forget(self, conversation: str) -> None:
        """Delete the state of a conversation and of all its candidates."""
        for number in range(self._samples):
            self._engine.forget(_conversation(conversation, number))

    def close(self) -> None:
        """Leave the engine open: its owner closes it."""


class _Streaming:
    """Chooses among candidates of a streaming engine."""

    def __init__(self, engine: StreamingEngine, samples: int, choose: Choose) -> None:
        self.name = engine.name
        self._engine, self._samples, self._choose = engine, samples, choose
        self._together = _Together(engine, samples, choose)
        self._asked: dict[str, tuple[Prompt, int]] = {}
        self._found: dict[str, dict[int, _Answer]] = {}

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Start sampling the candidates of prompts; `advance` returns the chosen answers."""
        candidates = []
        for prompt in prompts:
            self._found[prompt.conversation] = {}
            for number, each in enumerate(_candidates(prompt, self._samples)):
                self._asked[each.conversation] = prompt, number
                candidates.append(each)
        self._engine.submit(candidates, sampling)

    def advance(self) -> list[tuple[Prompt, _Answer]]:
        """Run one pass of the engine; return the prompts whose candidates are all sampled, with the chosen answers."""
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
        """Return one action or failure per prompt, in order."""
        return self._together.generate(prompts, sampling)

    def forget(self, conversation: str) -> None:
        """Delete the state of a conversation and of all its candidates."""
        self._together.forget(conversation)

    def close(self) -> None:
        """Leave the engine open: its owner closes it."""


def _candidates(prompt: Prompt, samples: int) -> list[Prompt]:
    """Return one prompt per candidate; the first is the prompt itself, the others have their own seeds."""
    more = (
        replace(prompt, seed=_seed(prompt.seed, each), conversation=_conversation(prompt.conversation, each))
        for each in range(1, samples)
    )
    return [prompt, *more]


def _conversation(name: str, number: int) -> str:
    """Return the name of a candidate's conversation; episodes are named differently, with `#` and digits at the end."""
    return f"{name}~{number}" if number else name


def _seed(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr((seed, number)).encode(), digest_size=6).digest())


def _chosen(prompt: Prompt, answers: Sequence[_Answer], choose: Choose) -> _Answer:
    """Return the chosen answer of a prompt; its field `candidates` holds the number of tokens of each candidate."""
    given = [one for one in answers if isinstance(one, Action)]
    if not given:
        return answers[0]
    written = tuple(len(one.token_ids or ()) for one in given)
    return replace(given[choose(prompt, given)], candidates=written)
