"""Branching turns of explored episodes, and the values by which they were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum


@dataclass(frozen=True)
class Forks:
    """Branching turns of an explored episode, and the values by which they were chosen."""

    task: str
    """Id of the task."""
    sample: int
    """Index among the trajectories of the task."""
    turns: tuple[int, ...]
    """Indices of the branching turns, in order."""
    seen: tuple[float, ...]
    """Value of each turn of the episode, by which turns were chosen [turns]: entropy over its largest possible value,
    from 0 to 1, or predicted probability of success."""

    @property
    def key(self) -> tuple[str, int]:
        """(task id, sample), as `Trajectory.key`."""
        return self.task, self.sample


def fork_counts(found: Sequence[Forks]) -> dict[str, float]:
    """Return the numbers of branching turns (`forks`) and of episodes that have any (`forked`), and the `mean_turn`."""
    turns = [turn for each in found for turn in each.turns]
    mean = {"mean_turn": round(fsum(turns) / len(turns), 4)} if turns else {}
    return {"forks": len(turns), "forked": sum(bool(each.turns) for each in found), **mean}
