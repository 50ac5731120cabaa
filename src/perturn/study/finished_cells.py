"""Keep using the recorded results of cells whose runs have been deleted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from perturn.data.episode_outcomes import Outcome
from perturn.errors import ConfigError, RunError
from perturn.study.cell_results import TaskListName, is_done
from perturn.study.cells import Cell, point_text
from perturn.study.tables.episode_table import EPISODES, read_episodes
from perturn.study.tables.study_records import read_cells

_Runs = tuple[str, ...]
"""Folders of the runs of a row of `cells.json`. Their names contain digests of all settings."""


class Kept:
    """Recorded rows of finished cells whose runs have been deleted or are unfinished."""

    def __init__(self, folder: Path) -> None:
        """Read the results that are recorded in a study's folder.

        Raises:
            RunError: If a file of results is malformed.
        """
        self._folder = folder
        self._cells: dict[tuple[_Runs, str], Mapping[str, Any]] = {}
        self._episodes: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
        if not (folder / "cells.json").is_file():
            return
        for row in read_cells(folder / "cells.json"):
            if row["state"] == "done" and row.get("runs"):
                self._cells[tuple(row["runs"]), row["panel"]] = row
        for each in read_episodes(folder / EPISODES):
            self._episodes[_key(each, each["point"])].append(each)

    def row(self, cell: Cell, task_list: TaskListName) -> Mapping[str, Any] | None:
        """Return the recorded row of a finished cell whose run is gone; None for any other cell."""
        found = self._cells.get((runs_of(self._folder, cell, task_list), task_list))
        return None if found is None or _speaks(cell) else found

    def episodes(self, cell: Cell, task_list: TaskListName) -> list[Mapping[str, Any]]:
        """Return the recorded episodes of a finished cell whose run is gone; empty for other cells.

        Raises:
            RunError: If the cell is recorded as done and its episodes are missing.
        """
        row = self.row(cell, task_list)
        if row is None:
            return []
        found = self._episodes[_key(row, point_text(row["point"]))]
        if not found:
            raise RunError(
                f"{self._folder / EPISODES} has no row of {cell.label} ({task_list}), which cells.json says is "
                "done and whose runs are gone; restore it, or remove cells.json to have all made again."
            )
        return found

    def outcomes(self, cell: Cell, task_list: TaskListName) -> list[Outcome]:
        """Return the recorded outcomes of a finished cell whose run is gone, sorted by task."""
        found = [
            Outcome(
                task=each["task"],
                score=each["score"],
                success=each["success"],
                failed=each.get("failed", False),
                turns=each["turns"],
                invalid=each["invalid"],
                surprise=None,
                policy="",
                kind=each["kind"],
            )
            for each in self.episodes(cell, task_list)
        ]
        return sorted(found, key=lambda one: one.task)

    def refuse_loss(self, cells: Iterable[tuple[Cell, TaskListName]]) -> None:
        """Raise an error if recorded results of deleted runs would be lost, because the study lacks their cells.

        Args:
            cells: All cells of the study, each with its task list.
        """
        planned = {(runs_of(self._folder, cell, task_list), task_list) for cell, task_list in cells}
        lost = [
            row
            for (runs, task_list), row in self._cells.items()
            if (runs, task_list) not in planned and not (self._folder / runs[0]).exists()
        ]
        if lost:
            first = lost[0]
            raise ConfigError(
                f"{self._folder} has results of {len(lost)} cells that this study does not have, or not yet, the first "
                f"{first['method']} seed {first['seed']}, and their runs are gone, so they would be lost; give this "
                "study another name."
            )


def runs_of(folder: Path, cell: Cell, task_list: TaskListName) -> _Runs:
    """Return the run folders of a cell, relative to the study's folder and without folders outside it."""
    runs = [cell.folder] if task_list == "tune" else [cell.folder, cell.scored]
    return tuple(str(run.relative_to(folder)) for run in runs if run.is_relative_to(folder))


def _speaks(cell: Cell) -> bool:
    """Return whether a cell's run exists and is finished. For an untrained model, the score must exist."""
    return is_done(cell, "tune") and (cell.folder.is_dir() or cell.scored.is_dir())


def _key(row: Mapping[str, Any], point: str) -> tuple[Any, ...]:
    return row["environment"], row["method"], point, row["seed"], row["panel"]
