"""Place of a turn in the tree of an episode's sequences: the turn it follows, or what opens a sequence of its own.

Standard library alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from perturn.rules import Message

OPENS = -1
"""`Turn.follows` of a turn that follows no other: it opens a sequence of its own."""


@dataclass(frozen=True)
class Opening:
    """Messages and tools before the observation of a turn that opens another sequence of an episode."""

    prompt: tuple[Message, ...] = ()
    """Messages before the observation, such as a system text. They never carry loss."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tool schemas given to the chat template."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables for the chat template."""


class Placed(Protocol):
    """Something with a place among the turns of an episode."""

    @property
    def follows(self) -> int | None:
        """Index of the turn whose context it extends; None: the turn before it."""
        ...

    @property
    def opening(self) -> Opening | None:
        """Messages and tools before it, where it opens another sequence."""
        ...


def misplaced(turns: Sequence[Placed], history: int | None = None) -> str | None:
    """Say which turn of an episode cannot stand where it says; None where all can.

    Args:
        turns: The turns of the episode, in the order they were taken.
        history: How many earlier turns the policy saw at each turn; None: all of its sequence.
    """
    for index, turn in enumerate(turns):
        if turn.follows is not None and not OPENS <= turn.follows < index:
            return f"turns[{index}].follows: expected {OPENS} or the index of an earlier turn, got {turn.follows}"
        if turn.opening is not None and (index == 0 or turn.follows != OPENS):
            return (
                f"turns[{index}].opening: expected it at a later turn with follows={OPENS} alone, since the first turn "
                "has the prompt of the trajectory"
            )
    if history is not None and any(turn.follows not in (None, at - 1) for at, turn in enumerate(turns)):
        return f"history: expected null where a turn has follows, got {history}"
    return None
