"""Remaining distance to a success before and after a turn. A turn that does not reduce it is an error."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perturn.errors import DataError

if TYPE_CHECKING:
    from perturn.types import Trajectory


@dataclass(frozen=True)
class Remaining:
    """Smallest number of turns to a success, before and after an action, from a `Pathfinder`."""

    before: int | None
    """Number of turns before the action; None: a success can no longer be reached."""
    after: int | None
    """Number of turns after the action; None: a success can no longer be reached."""

    @property
    def is_wrong(self) -> bool:
        """Whether the action was an error: the distance after it is not smaller than before it."""
        return self.after is None or (self.before is not None and self.after >= self.before)


def remaining_of(trajectory: Trajectory) -> list[Remaining]:
    """Return the recorded distance to a success for each turn [turns].

    Raises:
        DataError: If the distance was not measured for a turn.
    """
    found = [turn.remaining for turn in trajectory.turns if turn.remaining is not None]
    if len(found) < len(trajectory.turns):
        index = [turn.remaining for turn in trajectory.turns].index(None)
        raise DataError(
            f"task {trajectory.task.id!r:.80}, sample {trajectory.sample}: turns[{index}].remaining was "
            "not measured; a run measures it for whatever needs distance."
        )
    return found


def failed_as_lost(trajectory: Trajectory) -> Trajectory:
    """Return an episode of a group. In a FAILED episode, turns that were not measured get the distance None."""
    if trajectory.status != "failed":
        return trajectory
    lost = Remaining(None, None)
    turns = tuple(replace(turn, remaining=turn.remaining or lost) for turn in trajectory.turns)
    return replace(trajectory, turns=turns)


def wrong_turns(trajectory: Trajectory) -> list[bool]:
    """Return whether each turn was an error, that is, did not reduce the distance to a success [turns].

    Raises:
        DataError: If the distance was not measured for a turn.
    """
    return [each.is_wrong for each in remaining_of(trajectory)]
