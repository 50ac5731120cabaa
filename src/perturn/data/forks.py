"""Turns from which explored episodes are resumed, and the values that they were chosen by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum


@dataclass(frozen=True)
class Forks:
    """One explored episode: its branching turns, and the numbers by which they were chosen."""

    task: str
    """Id of its task."""
    sample: int
    """Index among the trajectories of the task."""
    turns: tuple[int, ...]
    """In order."""
    seen: tuple[float, ...]
    """For each turn of the episode, the value that decided: entropy, or the predicted probability of success, without
    unit [turns]."""

    @property
    def key(self) -> tuple[str, int]:
        """(task id, sample), as `Trajectory.key`."""
        return self.task, self.sample


def fork_counts(found: Sequence[Forks]) -> dict[str, float]:
    """Return how many turns were chosen (`forks`), in how many episodes (`forked`), and their `mean_turn`."""
    turns = [turn for each in found for turn in each.turns]
    mean = {"mean_turn": round(fsum(turns) / len(turns), 4)} if turns else {}
    return {"forks": len(turns), "forked": sum(bool(each.turns) for each in found), **mean}
