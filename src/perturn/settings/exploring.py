"""What all explorers have in common: the settings of their episodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from perturn.bounds import bounded
from perturn.settings.sections import COUNT, Tasks
from perturn.types import Sampling


@dataclass(frozen=True)
@bounded
class ExploreSettings:
    """Settings of every explorer: which tasks are played, how often and how."""

    tasks: Tasks = field(default_factory=Tasks)
    per_iteration: Annotated[int, COUNT] | None = None
    """Tasks of one iteration: the panel is shuffled by the seed and dealt out, and again when too few are left. None:
    all of the panel in each."""
    samples: Annotated[int, COUNT] = 1
    """Episodes of each task: the size of a group."""
    window: Annotated[int, COUNT] | None = None
    """Turns of an episode in one iteration, at most. One that is not over then goes on in the next iteration, beside
    the new ones, and the policy learns from the turns that it has (T-PPO). None: each is played to its end."""
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))
    concurrency: Annotated[int, COUNT] = 16
    """Episodes played at the same time."""
