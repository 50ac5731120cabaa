"""Abilities of an environment besides posing tasks, a Protocol each; all are optional.

Standard library alone. `perturn.types.Environment` is what each of them is beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from perturn.types import Task


class Expert(Protocol):
    """An environment that can also show how its tasks are solved."""

    def expert(self, task: Task) -> Sequence[str]:
        """Actions that solve the task, to be verified by playing them."""
        ...


class Demonstrator(Expert, Protocol):
    """An expert that also says what it thinks; optional, formats without thoughts leave them out."""

    def demonstration(self, task: Task) -> Sequence[tuple[str, str]]:
        """(thought, action) a turn; the actions are those of `expert`."""
        ...


class Teacher(Expert, Protocol):
    """An expert that also shows mistakes and all that can be said, to teach a policy from nothing; optional."""

    def clumsy(self, task: Task, seed: int) -> Sequence[str]:
        """Actions of an expert who errs and recovers, other ones for each seed."""
        ...

    def aimless(self, task: Task, seed: int, turns: int) -> Sequence[str]:
        """At most so many actions of somebody who tries what can be done, without a goal."""
        ...


class Pathfinder(Protocol):
    """An environment that also knows how far an episode is from its end; optional."""

    def remaining(self, task: Task, actions: Sequence[str], sense: str) -> Sequence[int | None]:
        """Turns that the way to a success still takes, at the start of an episode and after each of its actions.

        The world replays the actions by itself, and leaves a running episode alone.

        Args:
            task: The task.
            actions: What the world was sent, in order.
            sense: `shortest`: by who knows all of the world. `searching`: by the expert who takes over there, and
                knows no more than the episode has shown.

        Returns:
            Number of turns [actions + 1]; None: there is no way any more.
        """
        ...


class Corrector(Expert, Protocol):
    """An expert that also finishes what another began, to show where that one went wrong; optional."""

    def correct(self, task: Task, actions: Sequence[str]) -> Sequence[tuple[str, str]] | None:
        """(thought, action) a turn that solve the task after these actions of another, to be verified by playing them.

        The expert knows what the episode has shown. The world replays the actions by itself, and leaves a running
        episode alone. None: there is no way any more, or the expert finds none.
        """
        ...
