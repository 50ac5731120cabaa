"""Explorer `rollouts`: each task is played some times, from its beginning to its end."""

from __future__ import annotations

from dataclasses import dataclass

from perturn.explore.protocol import Explorer


@dataclass(frozen=True)
class Rollouts(Explorer):
    """Play each task of an iteration several times, from its beginning to its end.

    Source: none is needed; these are the samples of a task that every method of groups draws.
    Differs: nothing.
    """
