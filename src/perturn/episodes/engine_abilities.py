"""Abilities that an open engine may declare besides answering prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from perturn.types import Engine


@dataclass(frozen=True)
class EngineAbilities:
    """Abilities of an open engine besides answering prompts."""

    concurrent: bool = False
    """Whether several threads may call `generate` at the same time."""
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


def abilities_of(engine: Engine) -> EngineAbilities:
    """Return the abilities of an open engine; the defaults if the engine declares none."""
    return engine.abilities if isinstance(engine, DescribedEngine) else EngineAbilities()
