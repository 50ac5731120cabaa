"""Estimate how long the unfinished cells of a study take."""

from __future__ import annotations

import time
from collections.abc import Iterable
from statistics import fmean

from perturn.study.cells import Method
from perturn.study.run_cells import Conductor


def seconds_left(conductor: Conductor) -> float | None:
    """Return the expected time left in seconds; None if no cell is done.

    A cell is expected to take as long as the finished cells of its method, or else as long as all finished cells. Cells
    of this call count before cells of earlier calls, whose recorded times include stages that they copied.
    """
    board = conductor.board
    unknown = [method for method in board.plan.points if method not in board.chosen]
    found = []
    for folder, (cell, _) in board.to_do().items():
        whole = _expected(conductor, cell.of, board.scores_alone(cell))
        if whole is None:
            return None
        worker = conductor.running.get(folder)
        found.append(whole if worker is None else max(0.0, whole - (time.monotonic() - worker.began)))
    for method in unknown:
        for seed in board.plan.study.seeds:  # the tuning has trained the point on its own seeds
            found.append(_expected(conductor, method, seed in board.plan.study.tuned_seeds) or 0.0)
    return max(sum(found) / conductor.crew.most(conductor.peak_gb), max(found, default=0.0))


def _expected(conductor: Conductor, method: Method, alone: bool) -> float | None:
    """Return the mean time of the finished cells that are most like a cell; None if no cell is finished."""
    spent, before = conductor.spent, conductor.before
    for likely in (
        spent.get((method, alone)),
        before.get((method, alone)),
        _all(spent, alone),
        _all(before, alone),
        _all(spent, not alone),
    ):
        if likely:
            return fmean(likely)
    return None


def _all(times: dict[tuple[Method, bool], list[float]], alone: bool) -> list[float]:
    """Return the times of the cells of all methods that only had to be scored, or that also had to be trained."""
    kinds: Iterable[list[float]] = (each for (_, kind), each in times.items() if kind is alone)
    return [one for each in kinds for one in each]
