"""From which turns explored episodes are played on, where these were chosen by what a policy knew at them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Forks:
    """One explored episode: its turns that are played on from, and by what they were chosen."""

    task: str
    """Id of its task."""
    sample: int
    """Index among the trajectories of the task."""
    turns: tuple[int, ...]
    """In order."""
    seen: tuple[float, ...]
    """Of each turn of the episode, what the choice went by: entropy, or the predicted chance of a success, without unit
    [turns]."""

    @property
    def key(self) -> tuple[str, int]:
        """(task id, sample), as `Trajectory.key`."""
        return self.task, self.sample
