"""Seeds of episodes, and the jobs of an iteration's rollouts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from perturn.episodes.episode import Job
from perturn.types import Task


def make_jobs(tasks: Iterable[Task], seed: int, samples: int = 1, iteration: int = 1) -> list[Job]:
    """Return the episodes to play. An episode's seed depends only on the run's seed, task, sample and iteration."""
    later = (iteration,) if iteration > 1 else ()
    return [
        Job(task, seed_of(seed, task.id, sample, *later), sample)
        for sample in range(samples)
        for task in tasks
    ]


def seed_of(*parts: object) -> int:
    """Return a seed that depends on all the given parts, and on nothing else."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest())
