"""Group of trajectories that a credit compares: same task, same policy. Also: which of them count in its statistics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

from perturn.types import Task, Trajectory, failed, score, succeeded, unfinished

FAILURES = ("leave_out", "zero")
"""Treatments of a FAILED episode in the statistics of its group: it does not count, or it counts with score 0."""

ROUNDING = 1e-9
"""Weights and score differences up to this size count as 0, since sums of decimals have rounding errors."""


@dataclass(frozen=True)
class Group(Sequence[Trajectory]):
    """Trajectories of one task and one policy, in the order of their sample numbers; see `groups_of`."""

    trajectories: tuple[Trajectory, ...]
    """Trajectories of the group, at least one."""
    indices: tuple[int, ...]
    """Index of each trajectory in the list from which the groups were made [trajectories]."""

    @property
    def task(self) -> Task:
        """Task of the group."""
        return self.trajectories[0].task

    @property
    def policy(self) -> str:
        """Identity of the policy that acted."""
        return self.trajectories[0].policy

    @property
    def rewards(self) -> tuple[float, ...]:
        """Total reward of each trajectory, in units of reward; 0 if it FAILED [trajectories]."""
        return tuple(map(score, self.trajectories))

    @property
    def branches(self) -> tuple[Trajectory, ...]:
        """Trajectories that branch from another episode at one of its turns."""
        return tuple(one for one in self.trajectories if one.origin is not None)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Trajectory, ...]: ...

    def __getitem__(self, index: int | slice) -> Trajectory | tuple[Trajectory, ...]:
        """Return the trajectory at an index, or a tuple of trajectories for a slice."""
        return self.trajectories[index]

    def __len__(self) -> int:
        """Return the number of trajectories."""
        return len(self.trajectories)


def groups_of(trajectories: Iterable[Trajectory]) -> list[Group]:
    """Group trajectories by task and policy.

    The order of the input does not matter: groups are sorted by task id, and their trajectories by sample number.
    """
    found: dict[tuple[str, str], list[tuple[int, Trajectory]]] = {}
    for index, one in sorted(enumerate(trajectories), key=lambda each: each[1].key):
        found.setdefault((one.task.id, one.policy), []).append((index, one))
    return [
        Group(tuple(one for _, one in members), tuple(index for index, _ in members))
        for members in found.values()
    ]


def counts(trajectory: Trajectory, failures: str = "leave_out") -> bool:
    """Return whether a trajectory counts in the statistics of its group; `failures` is one of FAILURES."""
    return failures == "zero" or not failed(trajectory)


def counted(trajectories: Iterable[Trajectory], failures: str = "leave_out") -> list[Trajectory]:
    """Return the trajectories that count in the statistics of their groups, in order; see `counts`."""
    return [one for one in trajectories if counts(one, failures)]


def has_equal_outcomes(group: Sequence[Trajectory]) -> bool:
    """Return whether all scores and successes of a group are equal; a FAILED episode has score 0 and no success."""
    if any(map(unfinished, group)):
        return False
    scores = [score(one) for one in group]
    return max(scores) - min(scores) <= ROUNDING and len({succeeded(one) for one in group}) == 1
