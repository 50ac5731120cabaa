"""Show a running study in the terminal: its cells by method, running cells and their stages, errors, and time left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from perturn.data.run_files import Progress, read_note
from perturn.data.run_paths import RunPaths
from perturn.display.progress_bars import EVERY
from perturn.errors import RunError
from perturn.study.cells import Cell, point_text
from perturn.study.run_cells import Conductor
from perturn.study.study_progress import Board
from perturn.study.time_left import seconds_left

_STATES = ("done", "failed", "to do")


class Screen:
    """Progress of a study: a live table in a terminal, and lines of text elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console, self._live = console, Live(console=console, auto_refresh=False, transient=True)
        self._told: set[tuple[str, str]] = set()
        self._said = time.monotonic()

    @contextmanager
    def shown(self, board: Board) -> Iterator[None]:
        """Show the study's progress while the block runs."""
        self._told = {
            (cell.label, task_list)
            for cell, task_list in board.cells()
            if board.state(cell, task_list) != "to do"
        }
        if not self._console.is_interactive:
            yield
            return
        with self._live:
            yield

    def tell(self, conductor: Conductor) -> None:
        """Show the current progress."""
        board = conductor.board
        for cell, task_list in board.cells():
            state = board.state(cell, task_list)
            if state != "to do" and (cell.label, task_list) not in self._told:
                self._told.add((cell.label, task_list))
                error = f": {board.errors[cell.folder]}" if state == "failed" else ""
                style = "red" if error else None
                self._console.print(
                    f"{cell.label}, {task_list}: {state}{error}", markup=False, soft_wrap=True, style=style
                )
                self._said = time.monotonic()
        if self._live.is_started:
            self._live.update(_picture(conductor), refresh=True)
        elif not self._console.is_interactive and time.monotonic() - self._said >= EVERY:
            self._say_running(conductor)

    def _say_running(self, conductor: Conductor) -> None:
        """Print one line with the running cells and the time left."""
        self._said = time.monotonic()
        working = ", ".join(
            f"{worker.cell.label} {_stage(worker.cell)}".rstrip() for worker in conductor.running.values()
        )
        states = Counter(
            conductor.board.state(cell, task_list) for cell, task_list in conductor.board.cells()
        )
        left = seconds_left(conductor)
        said = "" if left is None else f"; about {_minutes(left)} left"
        done = f"{states['done']} of {states.total() + conductor.board.unknown} scores done"
        self._console.print(f"{done}; running: {working}{said}", markup=False, soft_wrap=True)


def _picture(conductor: Conductor) -> RenderableType:
    running = Table(box=None, pad_edge=False)
    for name in ("running", "stage", "since"):
        running.add_column(name)
    for worker in conductor.running.values():
        running.add_row(
            escape(worker.cell.label), _stage(worker.cell), _minutes(time.monotonic() - worker.began)
        )
    left = seconds_left(conductor)
    said = "" if left is None else f"; about {_minutes(left)} left"
    return Group(
        cells_table(conductor.board), running, Text(f"{len(conductor.running)} running{said}", style="bold")
    )


def _stage(cell: Cell) -> str:
    """Return the current stage of a cell's run or of its score."""
    for folder in (cell.scored, cell.folder):
        try:
            noted = read_note(RunPaths(folder).progress, Progress)
        except RunError:  # the manifest is being written
            noted = None
        if noted and "ended" not in noted:
            return noted["stage"] if folder == cell.folder else "test"
    return ""


def cells_table(board: Board) -> Table:
    """Return a table of the cells of each environment and method by state, with the chosen point."""
    counts: dict[tuple[str, str], Counter[str]] = {method: Counter() for method in board.plan.points}
    for cell, task_list in board.cells():
        counts[cell.of][f"{task_list} {board.state(cell, task_list)}"] += 1
    table, several = Table(box=None, pad_edge=False), len(board.plan.study.environments) > 1
    for column in ("method", "settings tried", "tuned", "tested", "failed", "chosen setting"):
        table.add_column(column, overflow="fold")
    for method, count in counts.items():
        name = " ".join(method) if several else method[1]
        table.add_row(name, str(len(board.plan.points[method])), *_numbers(count), _chosen(board, method))
    return table


def summary_line(board: Board) -> str:
    """Return a line with the number of runs, the share of work that is copied, and the errors."""
    kept = [board.kept.row(cell, task_list) is not None for cell, task_list in board.cells()]
    runs = {cell.folder: cell for (cell, _), gone in zip(board.cells(), kept, strict=True) if not gone}
    stages, made, lent = board.sharing.counts(runs.values())
    others = ", ".join(board.plan.study.share)
    there = f", {lent} are copied from {others}" if others else ""
    lines = [
        f"{board.plan.study.folder}: {len(runs)} runs with {stages} stages, of which {made} are computed{there} and "
        f"the others are shared between runs. {board.unknown} scores are of points that are not chosen yet."
    ]
    if any(kept):
        lines.append(
            f"The run folders of {sum(kept)} cells were deleted in whole or in part; their scores still count."
        )
    lines += [
        f"failed: {runs[folder].label}: {error}" for folder, error in board.errors.items() if folder in runs
    ]
    return "\n".join(lines)


def _numbers(count: Counter[str]) -> list[str]:
    """Return the finished and total numbers of cells for each task list, and the number of failed cells."""
    done = [
        f"{count[f'{task_list} done']}/{sum(count[f'{task_list} {state}'] for state in _STATES)}"
        for task_list in ("tune", "test")
    ]
    return [*done, str(count["tune failed"] + count["test failed"])]


def _chosen(board: Board, method: tuple[str, str]) -> str:
    if method not in board.chosen:
        return ""
    point = board.chosen[method]
    return "none" if point is None else escape(point_text(point))


def _minutes(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
