"""Requests for quantities: what an entry of a table must be given, by name or with the settings of the quantity."""

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
    sense: Literal["shortest", "searching"] = "shortest"
    """shortest, for one who knows all of the world, or searching, for the expert who takes over."""
