"""Run the cells of a study, each once, on the available workers."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from perturn.errors import PerturnError
from perturn.study.cell_results import peak_gb
from perturn.study.cells import Cell, Method
from perturn.study.finished_cells import Kept
from perturn.study.stage_sharing import Sources
from perturn.study.study_files import Files, write_results
from perturn.study.study_progress import Board

_logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""Interval between checks of the running cells, in seconds."""
_WRITE_SECONDS = 60.0
"""Least interval between two writes of the results of a running study, in seconds."""


class Worker(Protocol):
    """Process or actor that runs one cell."""

    cell: Cell
    began: float
    """Start time, by `time.monotonic`."""

    @property
    def has_ended(self) -> bool:
        """Whether the worker has ended, with or without an error."""

    def error(self) -> str | None:
        """Return the error of a worker that has ended; None if it succeeded."""

    def stop(self) -> None:
        """Ask the worker to stop."""

    def end(self) -> None:
        """Wait a while for the worker, then kill it."""


class Crew(Protocol):
    """Pool that starts workers on this machine or on the nodes of a cluster."""

    def most(self, peak_gb: float) -> int:
        """Return how many cells may run at the same time, if each needs `peak_gb` of memory; 0 means unknown."""

    def start(self, cell: Cell, sources: Sources, test: bool, log: Path) -> Worker:
        """Start a cell."""

    def wait(self, workers: Iterable[Any], seconds: float) -> None:
        """Wait until one of the workers has ended, at most this number of seconds."""

    def close(self) -> None:
        """End all idle workers."""


@dataclass
class Conductor:
    """Scheduler of a study's cells."""

    board: Board
    crew: Crew
    files: Files
    tell: Callable[[Conductor], None] = lambda conductor: None
    """Function that is called whenever the progress may have changed."""
    running: dict[Path, Worker] = field(default_factory=dict)
    spent: dict[tuple[Method, bool], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Times of the cells that this call has finished, in seconds, by method and by whether the cell only had to be
    scored."""
    before: dict[tuple[Method, bool], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Recorded times of the cells that were done before this call. They include stages copied from other cells."""
    peak_gb: float = 0.0
    """Peak memory of a cell by now, in GB."""
    _has_new: bool = field(default=False, init=False)
    """Whether a cell has ended since results were written."""
    _due: float = field(default=0.0, init=False)
    """Time from which results may be written again, by `time.monotonic`."""
    _told: str = field(default="", init=False)
    """Last error of a write, which is logged once."""

    def run(self) -> None:
        """Run all unfinished cells. Ctrl-C stops every worker, and the next call resumes the study."""
        for cell, task_list in self.board.cells():
            self.peak_gb = max(self.peak_gb, peak_gb(cell))
            if self.board.state(cell, task_list) == "done":
                self.before[cell.of, False].append(self.board.seconds(cell, task_list))
        try:
            while True:
                self._start(self.crew.most(self.peak_gb))
                self.tell(self)
                if not self.running:
                    return
                self._write()
                self.crew.wait(self.running.values(), _LOOK_SECONDS)
                self._collect()
        finally:
            for worker in self.running.values():
                worker.stop()
            for worker in self.running.values():
                worker.end()
            self.crew.close()

    def _start(self, most: int) -> None:
        """Start cells up to the limit, but no cell that shares an unfinished stage with a running cell."""
        busy: set[str] = set()
        for worker in self.running.values():
            self.board.sharing.look(worker.cell)
            busy |= self.board.sharing.to_make(worker.cell)
        for folder, (cell, test) in self.board.to_do().items():
            if len(self.running) >= most:
                return
            own = self.board.sharing.to_make(cell)
            if folder not in self.running and busy.isdisjoint(own):
                busy |= own
                sources = self.board.sharing.sources(cell)
                self.running[folder] = self.crew.start(cell, sources, test, self.files.log(cell))

    def _collect(self) -> None:
        """Record the results of workers that have ended."""
        for folder, worker in list(self.running.items()):
            if worker.has_ended:
                del self.running[folder]
                alone = self.board.scores_alone(worker.cell)
                self.board.ended(worker.cell, worker.error())
                self.peak_gb = max(self.peak_gb, peak_gb(worker.cell))
                self.spent[worker.cell.of, alone].append(time.monotonic() - worker.began)
                self._has_new = True

    def _write(self) -> None:
        """Write new results, so that a killed study has them. This takes at most a twentieth of the study's time."""
        began = time.monotonic()
        if not self._has_new or began < self._due:
            return
        try:
            write_results(self.files, self.board)
            self.board.kept = Kept(self.files.folder)  # runs may now be deleted
            self._has_new = False
        except (PerturnError, OSError) as error:  # the write at the end of the study raises it
            if str(error) != self._told:
                _logger.warning("the results cannot be written yet: %s", error)
            self._told = str(error)
        ended = time.monotonic()
        self._due = ended + max(_WRITE_SECONDS, 19 * (ended - began))
