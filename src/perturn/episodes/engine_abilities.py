"""Abilities of an open engine besides answering, for anyone who asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from perturn.types import Engine


@dataclass(frozen=True)
class EngineAbilities:
    """Abilities of an open engine besides answering."""

    concurrent: bool = False
    """Whether `generate` may be called from several threads at a time."""
    response_formats: frozenset[str] = frozenset()
    """Types of `Prompt.response_format` that it keeps to."""
    reads_thoughts: bool = True
    """Whether the thoughts of earlier turns reach the model."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Text of token ids; None: its answers have no token ids."""
    prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens of the newest prompt of each open conversation; empty if it does not count them."""
    answer_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens of the newest answer of each open conversation, for an engine whose answers have no token ids."""


@runtime_checkable
class DescribedEngine(Engine, Protocol):
    """An engine that declares further abilities."""

    abilities: EngineAbilities


def abilities_of(engine: Engine) -> EngineAbilities:
    """Return the abilities of an open engine; an engine that declares none has the defaults."""
    return engine.abilities if isinstance(engine, DescribedEngine) else EngineAbilities()
