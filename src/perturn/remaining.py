"""The way to a success that is left around a turn, and which turns were wrong by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from perturn.errors import DataError

if TYPE_CHECKING:
    from perturn.types import Trajectory


@dataclass(frozen=True)
class Remaining:
    """Turns that are left to a success, from a `Pathfinder`; None if it can no longer be reached."""

    before: int | None
    """Just before an action."""
    after: int | None
    """Just after it."""

    @property
    def is_wrong(self) -> bool:
        """Whether the action brought the success no nearer: the way after it is longer than a right one leaves."""
        return self.after is None or (self.before is not None and self.after >= self.before)


def remaining_of(trajectory: Trajectory) -> list[Remaining]:
    """Return the way to a success around each turn, as it was measured [turns].

    Raises:
        DataError: If it was not.
    """
    found = [turn.remaining for turn in trajectory.turns if turn.remaining is not None]
    if len(found) < len(trajectory.turns):
        index = [turn.remaining for turn in trajectory.turns].index(None)
        raise DataError(
            f"task {trajectory.task.id!r:.80}, sample {trajectory.sample}: turns[{index}].remaining was "
            "not measured; a run measures it for whatever needs distance."
        )
    return found


def wrong_turns(trajectory: Trajectory) -> list[bool]:
    """Return whether each turn brought the success no nearer [turns]; the first such turn is the first error.

    Raises:
        DataError: If that was not measured.
    """
    return [each.is_wrong for each in remaining_of(trajectory)]
