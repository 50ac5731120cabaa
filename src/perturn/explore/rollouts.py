"""Explorer `rollouts`: play each task several times, from its beginning to its end."""

from __future__ import annotations

from dataclasses import dataclass

from perturn.explore.protocol import Explorer


@dataclass(frozen=True)
class Rollouts(Explorer):
    """Play each task of an iteration several times, from its beginning to its end.

    Source: none is needed; every method that compares the episodes of a task plays such rollouts.
    Differs: nothing.
    """
