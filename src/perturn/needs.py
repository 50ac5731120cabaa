"""Requests for quantities by entries of a table: a name, or a name with the settings of the quantity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True)
class Need:
    """A request for a quantity. The settings of the quantity are fields of a subclass."""

    name: ClassVar[str]


@dataclass(frozen=True)
class Distance(Need):
    """Actions that the way to a success still takes around each turn, measured into `Turn.remaining`."""

    name: ClassVar[str] = "distance"
    sense: Literal["shortest", "searching"]
    """shortest, for one who knows all of the world, or searching, for the expert who takes over."""


@dataclass(frozen=True)
class SuccessChance(Need):
    """Chance of a success before each turn, by heads on hidden states that are fitted on other episodes."""

    name: ClassVar[str] = "success-chance"
    others: str = "tasks"
    """Episodes that a head learns from: those of other tasks (tasks), or any others (episodes)."""


def name_of(need: str | Need) -> str:
    """Return the name of the requested quantity."""
    return need if isinstance(need, str) else need.name
