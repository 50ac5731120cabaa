"""Read the iterations of a running run, incrementally from files that grow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Generic, TypeVar

from perturn.data.episode_outcomes import Outcome
from perturn.data.iteration_numbers import STAGES, account_of, is_number, ledger_of, seconds_of, training_of
from perturn.data.run_files import REMEDY
from perturn.data.run_paths import RunPaths
from perturn.errors import RunError
from perturn.io.read_input import lines_of, parse_object
from perturn.stats import cluster_interval

LAST = 6
"""Number of last iterations whose episodes are read. For earlier iterations the manifest is enough."""


@dataclass(frozen=True)
class Iteration:
    """An iteration that has finished its exploration. A number that is unknown or was not read is None."""

    number: int
    success_rate: float | None
    """Success rate of the finished explored episodes."""
    success_interval: tuple[float, float] | None = None
    """95 % interval of the success rate, clustered by task; read only for the last iterations."""
    mean_score: float | None = None
    """Mean total reward of the finished explored episodes; read only for the last iterations."""
    entropy: float | None = None
    """Entropy of the policy at the tokens it was trained on, in nats. If it is not logged, it is estimated from the
    sampled tokens."""
    kl: float | None = None
    """k3 estimate of the KL divergence from the reference over the policy's turns, in nats per token."""
    clip_share: float | None = None
    """Share of tokens whose gradient was removed by clipping."""
    asked: int | None = None
    """Requested number of units."""
    unit: str = "episodes"
    """Name of the units that are counted: `episodes`, `memberships`, or `nodes` if pairs share their first turns; see
    `ledger_of`."""
    bins: Mapping[str, int] = field(default_factory=dict)
    """Number of units in each bin."""
    without_spread: tuple[int, int] | None = None
    """Number of groups in which the credit is 0 at every turn, and number of all groups."""
    seconds: float = 0.0
    """Time spent in the stages of the iteration, in seconds, including the evaluation of its policy."""


def look_at_iterations(
    paths: RunPaths, stages: Mapping[str, Any], rows_of: Callable[[Path], Sequence[Any]]
) -> list[Iteration]:
    """Return the iterations that have finished their exploration, in order; empty for a recipe without iterations.

    Args:
        paths: Paths of the run.
        stages: Stages in the manifest.
        rows_of: Function that reads a file of episodes or metrics.
    """
    marks = [mark for mark in paths.marks if mark and is_done(stages, f"explore{mark}")]
    return [_look(paths, mark, stages, rows_of, mark in marks[-LAST:]) for mark in marks]


def is_done(stages: Mapping[str, Any], name: str) -> bool:
    """Return whether a stage is done."""
    return bool((stages.get(name) or {}).get("done"))


def _look(
    paths: RunPaths,
    mark: str,
    stages: Mapping[str, Any],
    rows_of: Callable[[Path], Sequence[Any]],
    is_late: bool,
) -> Iteration:
    notes = {name: stages.get(f"{name}{mark}") or {} for name in STAGES}
    played = notes["explore"].get("counts") or {}
    explored = played.get("episodes")
    ended = explored - played.get("unfinished", 0) if is_number(explored) else None
    ledger = ledger_of(account_of(notes), explored if isinstance(explored, int) else 0)
    groups = ledger["groups"] if ledger else {}
    episodes: Sequence[Outcome] = rows_of(paths.trajectories(f"explore{mark}")) if is_late else ()
    over = [one for one in episodes if not one.unfinished]
    logged = rows_of(paths.metrics(f"align{mark}"))
    trained = training_of(logged) if logged else {}
    surprises = [one.surprise for one in episodes if one.surprise is not None]
    entropy = trained.get("entropy")
    return Iteration(
        number=int(mark[1:]),
        success_rate=_share(played.get("success"), ended),
        success_interval=_interval(over) if over else None,
        mean_score=fmean(one.score for one in over) if over else None,
        entropy=entropy if entropy is not None or not surprises else fmean(surprises),
        kl=trained.get("kl"),
        clip_share=trained.get("clip_share"),
        asked=ledger["asked"] if ledger else None,
        unit=ledger["unit"] if ledger else "episodes",
        bins=ledger["bins"] if ledger else {},
        without_spread=(groups["zero_credit"], groups["groups"])
        if {"zero_credit", "groups"} <= groups.keys()
        else None,
        seconds=seconds_of(stages, mark),
    )


def _interval(episodes: Sequence[Outcome]) -> tuple[float, float]:
    found = cluster_interval([float(one.success) for one in episodes], [one.task for one in episodes])
    return found.low, found.high


def _share(part: Any, whole: Any) -> float | None:
    return part / whole if is_number(part) and is_number(whole) and whole else None


T = TypeVar("T")


def parse_metrics(raw: bytes, where: str) -> dict[str, float]:
    """Return the numbers in a line of metrics, including NaN and infinities.

    Raises:
        RunError: If the line is no JSON object.
    """
    row = parse_object(raw, where, RunError, REMEDY)
    return {
        key: value
        for key, value in row.items()
        if isinstance(value, float) or (type(value) is int and abs(value) < 2**53)
    }


class Tail(Generic[T]):
    """Rows of a file that grows or is rewritten. Each line is read once, when it is complete."""

    def __init__(self, file: Path, parse: Callable[[bytes, str], T]) -> None:
        self._file, self._parse = file, parse
        self._identity: tuple[int, int] | None = None
        self._offset = self._line = 0
        self.rows: list[T] = []

    def look(self) -> list[T]:
        """Return all rows that are in the file now.

        Raises:
            RunError: If a complete line is malformed.
        """
        try:
            status = self._file.stat()
        except OSError:
            self._reset()
            return self.rows
        if (status.st_dev, status.st_ino) != self._identity or status.st_size < self._offset:
            self._reset()
            self._identity = (status.st_dev, status.st_ino)
        if status.st_size == self._offset:
            return self.rows
        with self._file.open("rb") as file:
            file.seek(self._offset)
            for _, raw in lines_of(file, str(self._file), RunError, REMEDY):
                if not raw.endswith(b"\n"):
                    break
                self._line += 1
                self.rows.append(self._parse(raw, f"{self._file}:{self._line}"))
                self._offset += len(raw)
        return self.rows

    def _reset(self) -> None:
        self._identity, self._offset, self._line, self.rows = None, 0, 0, []
