"""A study, done: every cell once, as many at the same time as there are workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

import psutil

from perturn.study.board import Board
from perturn.study.files import Files
from perturn.study.results import peak_gb
from perturn.study.worker import Worker

_LOOK_SECONDS = 1.0
"""How often running cells are looked at."""


@dataclass
class Conductor:
    """Has the cells of a study done."""

    board: Board
    workers: int
    threads: int
    """Of each worker."""
    files: Files
    tell: Callable[[Conductor], None] = lambda conductor: None
    """Called whenever something may have changed."""
    running: dict[Path, Worker] = field(default_factory=dict)
    spent: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    """Seconds of the cells done by now, by whether they were scores alone."""

    peak_gb: float = 0.0
    """The most memory that a cell has had."""

    def run(self) -> None:
        """Do all that is to do; Ctrl-C stops every worker, and the next call goes on."""
        free_gb = psutil.virtual_memory().available / 1e9
        for cell, _ in self.board.cells():
            self.peak_gb = max(self.peak_gb, peak_gb(cell))
        try:
            while True:
                self._start(min(self.workers, int(free_gb / self.peak_gb)) if self.peak_gb else self.workers)
                self.tell(self)
                if not self.running:
                    return
                wait([worker.sentinel for worker in self.running.values()], timeout=_LOOK_SECONDS)
                self._collect()
        finally:
            for worker in self.running.values():
                worker.stop()
            for worker in self.running.values():
                worker.end()

    def _start(self, most: int) -> None:
        """Start cells until so many run: those that share nothing with a running one that is still to be made."""
        busy: set[str] = set()
        for worker in self.running.values():
            self.board.sharing.look(worker.cell)
            busy |= self.board.sharing.to_make(worker.cell)
        for folder, (cell, test) in self.board.to_do().items():
            if len(self.running) >= max(1, most):
                return
            own = self.board.sharing.to_make(cell)
            if folder not in self.running and busy.isdisjoint(own):
                busy |= own
                sources = self.board.sharing.sources(cell)
                self.running[folder] = Worker(cell, sources, test, self.threads, self.files.log(cell))

    def _collect(self) -> None:
        """Take note of the workers that have ended."""
        for folder, worker in list(self.running.items()):
            if worker.has_ended:
                del self.running[folder]
                alone = self.board.scores_alone(worker.cell)
                self.board.ended(worker.cell, worker.error())
                self.peak_gb = max(self.peak_gb, peak_gb(worker.cell))
                self.spent[alone].append(time.monotonic() - worker.began)
