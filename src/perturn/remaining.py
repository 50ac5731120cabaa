"""The way to a success that is left around a turn, and which turns were wrong by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from perturn.errors import DataError

if TYPE_CHECKING:
    from perturn.types import Trajectory


@dataclass(frozen=True)
class Remaining:
    """Turns that the way to a success still takes, as a `Pathfinder` says; None: there is no way any more."""

    before: int | None
    """Just before an action."""
    after: int | None
    """Just after it."""

    @property
    def is_wrong(self) -> bool:
        """Whether the action brought the success no nearer: the way after it is longer than a right one leaves."""
        return self.after is None or (self.before is not None and self.after >= self.before)

    @property
    def leads_away(self) -> bool:
        """Whether the way is even longer than before the action."""
        return self.before is not None and (self.after is None or self.after > self.before)


def wrong_turns(trajectory: Trajectory) -> list[bool]:
    """Whether each turn brought the success no nearer [turns]; the first one that did not is the first error.

    Raises:
        DataError: If that was not measured.
    """
    found = [turn.remaining for turn in trajectory.turns]
    if None in found:
        raise DataError(
            f"task {trajectory.task.id!r:.80}, sample {trajectory.sample}: turns[{found.index(None)}].remaining was "
            "not measured; a run measures it for whatever needs distance."
        )
    return [each is not None and each.is_wrong for each in found]
