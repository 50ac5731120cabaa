"""One episode to play, as a job."""

from __future__ import annotations

from dataclasses import dataclass

from perturn.types import Task, Trajectory


@dataclass(frozen=True)
class Job:
    """One episode to play."""

    task: Task
    seed: int
    sample: int = 0
    begun: Trajectory | None = None
    """An episode to resume: the world is reset in the same way, and its turns are played first."""
    kept: int | None = None
    """How many of them; None: all."""
    window: int | None = None
    """Turns that are played now, at most; an episode that could go on is then left UNFINISHED. None: all."""
    anew: bool = False
    """Whether the world may answer the last kept action otherwise than it did: that reply is not checked."""

    @property
    def conversation(self) -> str:
        """Identity of its conversation."""
        return f"{self.task.id}#{self.sample}"
