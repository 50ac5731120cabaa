"""The worth of an episode: one definition, wherever episodes are counted, scored, taught or shown.

An episode that FAILED stays in every denominator: it scores 0 and is no success, whatever its record says.
"""

from __future__ import annotations

from perturn.types import Status, Trajectory


def failed(trajectory: Trajectory) -> bool:
    """Whether the environment or the engine raised."""
    return trajectory.status is Status.FAILED


def score(trajectory: Trajectory) -> float:
    """The total reward; 0 if it FAILED."""
    return 0.0 if failed(trajectory) else trajectory.total_reward


def succeeded(trajectory: Trajectory) -> bool:
    """Whether the task was solved; not if it FAILED."""
    return trajectory.success and not failed(trajectory)
