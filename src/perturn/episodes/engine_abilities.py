"""Abilities that an open engine may declare besides answering prompts, and a check of its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from perturn.errors import EngineFailure, check_fit, check_type
from perturn.types import Action, Engine


@dataclass(frozen=True)
class EngineAbilities:
    """Abilities of an open engine besides answering prompts."""

    concurrent_calls: int = 0
    """Largest number of threads that call `generate` at the same time, each with a single prompt. 0: one thread calls
    `generate`, with batches of prompts."""
    response_formats: frozenset[str] = frozenset()
    """Types of `Prompt.response_format` that the engine follows."""
    reads_thoughts: bool = True
    """Whether the thoughts of earlier turns reach the model."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Function from token ids to text. None: the engine's answers have no token ids."""
    prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    """Number of tokens in the newest prompt, by open conversation; empty if the engine does not count tokens."""
    answer_tokens: Mapping[str, int] = field(default_factory=dict)
    """Number of tokens in the newest answer, by open conversation, for an engine whose answers have no token ids."""


@runtime_checkable
class DescribedEngine(Engine, Protocol):
    """An engine that declares its abilities."""

    abilities: EngineAbilities


@runtime_checkable
class CancellingEngine(Engine, Protocol):
    """An engine that can stop generating an answer that is no longer needed."""

    def cancel(self, conversation: str) -> None:
        """Stop answering the prompt of a conversation. `advance` of a streaming engine then does not return it."""
        ...


def abilities_of(engine: Engine) -> EngineAbilities:
    """Return the abilities of an open engine; the defaults if the engine declares none."""
    return engine.abilities if isinstance(engine, DescribedEngine) else EngineAbilities()


def checked_answers(engine: Engine, answers: Any, count: int) -> Sequence[Action | EngineFailure]:
    """Return the answers of an engine.

    Args:
        engine: The engine.
        answers: What the engine returned.
        count: Number of prompts.

    Raises:
        ConfigError: If there is not one action or failure for each prompt.
    """
    name, remedy = f"engine {engine.name!r}", "perturn.engines.engine_check.check_engine lists all problems."
    fits = isinstance(answers, list | tuple) and len(answers) == count
    check_fit(fits, name, f"return a list of {count} answers, one for each prompt", answers, remedy)
    expected = (
        "a perturn.types.Action or an EngineFailure, as perturn.engines.engine_check.check_engine checks"
    )
    for answer in answers:
        check_type(f"each answer of {name}", answer, Action | EngineFailure, expected)
    found: Sequence[Action | EngineFailure] = answers
    return found
