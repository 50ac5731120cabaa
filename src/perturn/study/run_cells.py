"""A study, done: every cell once, as many at the same time as there are workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from perturn.study.cell_results import peak_gb
from perturn.study.cells import Cell
from perturn.study.stage_sharing import Sources
from perturn.study.study_files import Files
from perturn.study.study_progress import Board

_LOOK_SECONDS = 1.0
"""How often running cells are looked at."""


class Worker(Protocol):
    """Who does one cell."""

    cell: Cell
    began: float
    """Moment, by `time.monotonic`."""

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, however."""

    def error(self) -> str | None:
        """Return why it failed, once it has ended; None: it did not."""

    def stop(self) -> None:
        """Ask it to stop."""

    def end(self) -> None:
        """Wait for it a while, then kill it."""


class Crew(Protocol):
    """Who starts workers: on this machine, or on the nodes of a cluster."""

    def most(self, peak_gb: float) -> int:
        """Return cells at the same time, if each needs so much memory; 0: not known yet."""

    def start(self, cell: Cell, sources: Sources, test: bool, log: Path) -> Worker:
        """Start a cell."""

    def wait(self, workers: Iterable[Any], seconds: float) -> None:
        """Wait until one of them has ended, or so long."""

    def close(self) -> None:
        """End all that is idle."""


@dataclass
class Conductor:
    """Has the cells of a study done."""

    board: Board
    crew: Crew
    files: Files
    tell: Callable[[Conductor], None] = lambda conductor: None
    """Called whenever something may have changed."""
    running: dict[Path, Worker] = field(default_factory=dict)
    spent: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    """Seconds of the cells done by now, by whether they were scores alone."""

    peak_gb: float = 0.0
    """The most memory that a cell has had."""

    def run(self) -> None:
        """Run all cells that are not done; Ctrl-C stops every worker, and the next call resumes."""
        for cell, _ in self.board.cells():
            self.peak_gb = max(self.peak_gb, peak_gb(cell))
        try:
            while True:
                self._start(self.crew.most(self.peak_gb))
                self.tell(self)
                if not self.running:
                    return
                self.crew.wait(self.running.values(), _LOOK_SECONDS)
                self._collect()
        finally:
            for worker in self.running.values():
                worker.stop()
            for worker in self.running.values():
                worker.end()
            self.crew.close()

    def _start(self, most: int) -> None:
        """Start cells, as many as there are workers: only cells that share no stage with a running cell."""
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
        """Take note of the workers that have ended."""
        for folder, worker in list(self.running.items()):
            if worker.has_ended:
                del self.running[folder]
                alone = self.board.scores_alone(worker.cell)
                self.board.ended(worker.cell, worker.error())
                self.peak_gb = max(self.peak_gb, peak_gb(worker.cell))
                self.spent[alone].append(time.monotonic() - worker.began)
