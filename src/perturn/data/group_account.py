"""Account of all requested episodes in the credit stage: which are trained on, and why others are not."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from perturn.data.store import read_records, write_records
from perturn.errors import DataError
from perturn.group import ROUNDING, counted, has_equal_outcomes
from perturn.types import SPARSE, Trajectory, are_factors, failed

BINS = ("trained", "no_spread", "failed", "stale", "cut", "filtered")
"""Categories of requested episodes. Each episode is in exactly one category."""

Weights = Sequence[Sequence[float]]
"""Weights of a group's turns, without unit `[trajectories][turns]`."""


@dataclass(frozen=True)
class CreditRow:
    """Category of a requested episode, and the weights of its turns."""

    task: str
    """Id of its task."""
    sample: int
    """Index among the trajectories of the task."""
    bin: str
    """Category of the episode, one of BINS."""
    weight: tuple[float, ...]
    """Weight of each turn from the credit, without unit [turns]. Training reads only the weights of `trained`
    episodes."""
    clip: tuple[float, ...] | None = field(default=None, metadata=SPARSE)
    """Factor on the clip range of each turn, > 0, without unit [turns]. None: the factors are 1."""

    @property
    def key(self) -> tuple[str, int]:
        """(task id, sample), as `Trajectory.key`."""
        return self.task, self.sample


def read_credits(file: str | os.PathLike[str]) -> list[CreditRow]:
    """Return the rows of a file of credits, in order.

    Raises:
        DataError: If a line is malformed, has an unknown category, or repeats an episode.
    """
    found: dict[tuple[str, int], CreditRow] = {}
    for number, row in enumerate(read_records(file, CreditRow), start=1):
        _check(row, f"{file}:{number}: ")
        if row.key in found:
            raise DataError(
                f"{file}:{number}: task: expected a task and sample not seen before, got {row.task!r:.80}, sample "
                f"{row.sample}. Give the credit again."
            )
        found[row.key] = row
    return list(found.values())


def write_credits(file: str | os.PathLike[str], rows: Iterable[CreditRow]) -> int:
    """Write or replace a file of credits, completely or not at all; return the number of rows."""
    rows = list(rows)
    for row in rows:
        _check(row, "")
    return write_records(file, rows)


def _check(row: CreditRow, where: str) -> None:
    if row.bin not in BINS:
        raise DataError(
            f"{where}bin: expected one of {', '.join(BINS)}, got {row.bin!r:.80}. Give the credit again."
        )
    if row.clip is not None and not are_factors(row.clip, len(row.weight)):
        raise DataError(
            f"{where}clip: expected a number > 0 for each of {len(row.weight)} weights, got {row.clip!r:.200}. Give "
            "the credit again."
        )


def ledger(
    groups: Sequence[Sequence[Trajectory]],
    weights: Sequence[Weights],
    clips: Sequence[Sequence[Sequence[float] | None]] | None = None,
    *,
    drop_equal_outcomes: bool,
    too_long: Collection[tuple[str, int]] = (),
    filtered: Collection[tuple[str, int]] = (),
    stale: Collection[tuple[str, int]] = (),
    failures: str = "leave_out",
) -> list[CreditRow]:
    """Assign each episode to one of BINS: the first in this list that applies.

    - failed: its status is FAILED. `failures` says how it counted in its group's statistics.
    - stale: its group has tokens of a policy that is too old.
    - no_spread: it has no turn, or all weights of its group are 0, for example because the group has no other episode
      for a baseline.
    - cut: its first turn exceeds the length limit of training.
    - filtered: its signals leave it out, or all outcomes of its group are equal and such groups are dropped. It counted
      in its group's statistics.
    - trained: all other episodes.

    Args:
        groups: Groups; each holds the trajectories of one task.
        weights: Weights of each group's turns from the credit, without unit [groups][trajectories][turns].
        clips: Factors on the clip ranges of each group's turns, in the same shape; None for trajectories without
            factors.
        drop_equal_outcomes: Whether to leave out groups whose trajectories all have the same score and the same
            success.
        too_long: Keys of the trajectories whose first turn exceeds the length limit.
        filtered: Keys of the trajectories that their signals leave out.
        stale: Keys of the trajectories in groups with tokens of a policy that is too old.
        failures: One of FAILURES.

    Returns:
        One row per trajectory, in the order of the groups.

    Raises:
        DataError: If a trajectory does not have a finite weight for each of its turns.
    """
    rows = []
    none = [[None] * len(group) for group in groups]
    for group, given, ranges in zip(groups, weights, none if clips is None else clips, strict=True):
        spread = not _is_zero(given)
        compared = counted(group, failures)
        dropped = drop_equal_outcomes and len(compared) > 1 and has_equal_outcomes(compared)
        for trajectory, weight, clip in zip(group, given, ranges, strict=True):
            is_left_out = dropped or trajectory.key in filtered
            is_stale, is_too_long = trajectory.key in stale, trajectory.key in too_long
            where = (
                "stale"
                if is_stale and not failed(trajectory)
                else _bin(trajectory, spread, is_left_out, is_too_long)
            )
            factors = None if clip is None else tuple(clip)
            rows.append(CreditRow(*trajectory.key, where, _checked(trajectory, weight), factors))
    return rows


def _bin(trajectory: Trajectory, spread: bool, is_left_out: bool, is_too_long: bool) -> str:
    if failed(trajectory):
        return "failed"
    if not spread or not trajectory.turns:
        return "no_spread"
    if is_too_long:
        return "cut"
    return "filtered" if is_left_out else "trained"


def _checked(trajectory: Trajectory, weight: Sequence[float]) -> tuple[float, ...]:
    found, turns = tuple(map(float, weight)), len(trajectory.turns)
    if len(found) != turns or not all(map(math.isfinite, found)):
        raise DataError(
            f"task {trajectory.task.id!r:.80}, sample {trajectory.sample}: expected of the credit a finite weight for "
            f"each of {turns} turns, got {found!r:.200}. Correct the credit."
        )
    return found


def _is_zero(weights: Weights) -> bool:
    return all(abs(each) <= ROUNDING for of_one in weights for each in of_one)


def counts_of(
    groups: Sequence[Sequence[Trajectory]], rows: Iterable[CreditRow], failures: str = "leave_out"
) -> dict[str, int]:
    """Return the counts of an account of episodes.

    Args:
        groups: Groups; each holds the trajectories of one task.
        rows: Rows of `ledger` for these groups.
        failures: One of FAILURES.

    Returns:
        `asked`: number of episodes; for each of BINS its number of episodes, which sum to `asked`; `groups`: number of
        groups; `alone`: groups in which at most one trajectory counts. Among the other groups, `equal_outcomes` and
        `zero_credit` count groups with equal outcomes and groups whose weights are all 0; a group may count in both.
    """
    rows = list(rows)
    weight = {row.key: row.weight for row in rows}
    compared = [counted(group, failures) for group in groups]
    several = [group for group in compared if len(group) > 1]
    bins = [row.bin for row in rows]
    return {
        "asked": len(rows),
        **{name: bins.count(name) for name in BINS},
        "groups": len(groups),
        "alone": len(groups) - len(several),
        "equal_outcomes": sum(map(has_equal_outcomes, several)),
        "zero_credit": sum(_is_zero([weight[one.key] for one in group]) for group in several),
    }
