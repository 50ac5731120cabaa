"""Track the progress of a study's cells, and the points that have been chosen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from perturn.data.episode_outcomes import Outcome
from perturn.study.cell_results import TASK_LISTS, TaskListName, choose, is_done, outcomes, seconds
from perturn.study.cells import Cell, Method, Plan, Point
from perturn.study.finished_cells import Kept
from perturn.study.rescore import Again
from perturn.study.stage_sharing import Sharing, lent_runs


class Board:
    """The cells of a study and their states."""

    def __init__(self, plan: Plan | Again) -> None:
        """Read which cells are already done."""
        self.plan = plan
        self.kept = Kept(plan.study.folder)
        """Recorded results of cells whose runs are gone."""
        self.sharing = Sharing()
        for folder, recipe in lent_runs(plan.study):
            self.sharing.lend(folder, recipe)
        self.errors: dict[Path, str] = {}
        """Errors of failed runs and scores, by the folder of the cell's run."""
        self.chosen: dict[Method, Point | None] = {}
        """Chosen point of each method whose tuning has ended; None if no point was finished on every seed."""
        self.tuning = list(plan.tuning())
        self._testing: dict[Method, list[Cell]] = {}
        self._done: set[tuple[Path, TaskListName]] = set()
        for cell in self.tuning:
            self._enter(cell)
        self.choose()

    def _enter(self, cell: Cell) -> None:
        self.sharing.add(cell)
        self._look(cell)

    def _look(self, cell: Cell) -> None:
        """Check for which task lists a cell is done, by its runs or by its recorded rows."""
        for task_list in TASK_LISTS:
            if is_done(cell, task_list) or self.kept.row(cell, task_list) is not None:
                self._done.add((cell.folder, task_list))
            else:
                self._done.discard((cell.folder, task_list))

    def cells(self) -> Iterator[tuple[Cell, TaskListName]]:
        """Yield all cells that are known by now, each with the task list on which it is scored."""
        yield from ((cell, "tune") for cell in self.tuning)
        for cells in self._testing.values():
            yield from ((cell, "test") for cell in cells)

    def state(self, cell: Cell, task_list: TaskListName) -> str:
        """Return the state of a cell on a task list: `done`, `failed` or `to do`."""
        if (cell.folder, task_list) in self._done:
            return "done"
        return "failed" if cell.folder in self.errors else "to do"

    def to_do(self) -> dict[Path, tuple[Cell, bool]]:
        """Return the cells to run, by folder, and whether each is also scored on the test tasks."""
        found: dict[Path, tuple[Cell, bool]] = {}
        for cell, task_list in self.cells():
            if self.state(cell, task_list) == "to do":
                found[cell.folder] = cell, task_list == "test" or found.get(cell.folder, (cell, False))[1]
        return found

    def possible(self) -> Iterator[Cell]:
        """Yield the cells that may have to be run; for a method that is still tuned, the cells of all points."""
        found = {folder: cell for folder, (cell, _) in self.to_do().items()}
        found |= {cell.folder: cell for cell in self._untested() if cell.folder not in found}
        yield from found.values()

    def _untested(self) -> Iterator[Cell]:
        """Yield the cells of every point and seed, for methods that are still tuned."""
        for method, points in self.plan.points.items():
            if method not in self.chosen:
                yield from (cell for point in points for cell in self.plan.testing(*method, point))

    @property
    def unknown(self) -> int:
        """Number of test cells of methods whose point is not chosen yet."""
        return (len(self.plan.points) - len(self.chosen)) * len(self.plan.study.seeds)

    def scores_alone(self, cell: Cell) -> bool:
        """Return whether a cell's run is done, so that only its score on the test tasks is missing."""
        return (cell.folder, "tune") in self._done

    def seconds(self, cell: Cell, task_list: TaskListName) -> float:
        """Return the recorded time of a done cell in seconds, including stages that were copied from other cells."""
        row = self.kept.row(cell, task_list)
        return seconds(cell, task_list) if row is None else float(row["seconds"] or 0.0)

    def ended(self, cell: Cell, error: str | None) -> None:
        """Record that the worker of a cell has ended."""
        self.sharing.look(cell)
        self._look(cell)
        if error is not None:
            self.errors[cell.folder] = error
        self.choose()

    def lose(self, cell: Cell, task_list: TaskListName, error: str) -> None:
        """Record that the results of a done cell are gone, so that the cell has failed."""
        self._done.discard((cell.folder, task_list))
        self.errors[cell.folder] = error

    def choose(self) -> None:
        """Choose the point of every method whose tuning cells have all ended."""
        for method, points in self.plan.points.items():
            if method in self.chosen:
                continue
            cells = [cell for cell in self.tuning if cell.of == method]
            if len(points) == 1:
                self.chosen[method] = points[0]
            elif all(self.state(cell, "tune") != "to do" for cell in cells):
                self.chosen[method] = choose(self._scores(points, cells))
            else:
                continue
            point = self.chosen[method]
            self._testing[method] = [] if point is None else list(self.plan.testing(*method, point))
            for cell in self._testing[method]:
                self._enter(cell)

    def _scores(self, points: list[Point], cells: list[Cell]) -> Iterator[tuple[Point, list[Outcome]]]:
        """Yield the points that are finished on every seed, each with its episodes."""
        for point in points:
            its = [cell for cell in cells if cell.point == point]
            played = [self._outcomes(cell) for cell in its if self.state(cell, "tune") == "done"]
            if len(played) == len(its) and all(played):
                yield point, [one for each in played for one in each]

    def _outcomes(self, cell: Cell) -> list[Outcome]:
        """Return the episodes of a cell on the tuning tasks."""
        return self.kept.outcomes(cell, "tune") or outcomes(cell, "tune")
