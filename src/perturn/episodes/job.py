"""Description of an episode to play."""

from __future__ import annotations

from dataclasses import dataclass

from perturn.types import Task, Trajectory


@dataclass(frozen=True)
class Job:
    """An episode to play."""

    task: Task
    seed: int
    sample: int = 0
    begun: Trajectory | None = None
    """Recorded episode to resume. The environment is reset in the same way, and the recorded turns are replayed
    first."""
    kept: int | None = None
    """Number of recorded turns to replay. None: all."""
    window: int | None = None
    """Largest number of new turns. An episode that has not ended after these turns is UNFINISHED. None: no limit
    besides the protocol's."""
    anew: bool = False
    """Whether to skip the check of the observation after the last kept action, which may differ from the recorded
    one."""

    @property
    def conversation(self) -> str:
        """Identity of the episode's conversation."""
        return f"{self.task.id}#{self.sample}"
