"""A tool call, and a format of calls: how a family of models writes calls, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Tools = Sequence[Mapping[str, Any]]
"""Schemas of the tools that are offered, in the form of chat templates."""


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """Calls or words that a format read at one place of a text."""

    end: int
    """Position after the call."""
    calls: tuple[ToolCall, ...] = ()
    text: str = ""
    """Words for the user, or a thought between `<think>` and `</think>`."""


@dataclass(frozen=True)
class CallFormat:
    """Format in which a family of models writes tool calls."""

    models: str
    """Models that write calls in this format."""
    opens: str
    """Regular expression, without groups, of the beginning of a call."""
    read: Callable[[str, int, Tools], Found | None]
    """(text, where `opens` matched, offered tools) -> what stands there; None where it is malformed."""
    write: Callable[[Sequence[ToolCall]], str]
    """Calls as these models write them."""
    marks: tuple[str, ...] = ()
    """Texts that open and close a call. An answer that has one of them where no call can be read is malformed."""
    tokens: tuple[str, ...] = ()
    """Other parts of a call that may be special tokens. They are kept as the marks are when tokens are decoded."""
    bare: Callable[[str, int], Found | None] | None = None
    """(text, where JSON begins) -> the calls that all of the text from there on is, if these models write calls
    without marks; None where it is a malformed call."""
