"""Seeds of episodes, and the episodes of an iteration that start from a task's first turn."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from perturn.episodes.episode import Job
from perturn.types import Task


def make_jobs(tasks: Iterable[Task], seed: int, samples: int = 1, iteration: int = 1) -> list[Job]:
    """Return episodes to play; the seed of each depends on the run's seed, its task, sample and iteration alone."""
    later = (iteration,) if iteration > 1 else ()
    return [
        Job(task, seed_of(seed, task.id, sample, *later), sample)
        for sample in range(samples)
        for task in tasks
    ]


def seed_of(*parts: object) -> int:
    """Return a seed that depends on all parts, and on nothing else."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest())
