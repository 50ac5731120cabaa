"""A cell runs in its own process, forked from a process that has imported all that training needs.

Importing takes longer than a small cell. The processes are in their own sessions, so that Ctrl-C at a terminal reaches
them through the study alone, and they end with it, however it ends.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from perturn.errors import PerturnError
from perturn.io.plain_data import told
from perturn.run.execute import open_run, run_stages
from perturn.run.served_policy import policy_path
from perturn.study.cell_results import forget_stale, note_scored
from perturn.study.cells import Cell
from perturn.study.stage_sharing import Sources, take_over
from perturn.table import locate

_IMPORTED = (
    "perturn.study.cell_processes",
    "perturn.run.stages.train_stage",
    "perturn.run.stages.group_stage",
    "perturn.engines.local.engine",
    "accelerate",
)
"""Modules that the processes begin with."""
_GRACE_SECONDS = 20.0
"""How long a process may take to stop, which is to write a checkpoint."""


class Processes:
    """The processes on this machine, with a limit on their number."""

    def __init__(self, size: int, threads: int) -> None:
        """Run `size` processes at a time, each with this number of threads for numerical work."""
        self._size, self._threads = size, threads
        self._free_gb = psutil.virtual_memory().available / 1e9
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(_IMPORTED))

    def most(self, peak_gb: float) -> int:
        """Return how many cells fit at the same time, given the memory of a cell; 0: not known yet."""
        return max(1, min(self._size, int(self._free_gb / peak_gb))) if peak_gb else self._size

    def start(self, cell: Cell, sources: Sources, test: bool, log: Path) -> ProcessWorker:
        """Start a cell."""
        return ProcessWorker(self._context, cell, sources, test, self._threads, log)

    def wait(self, workers: Iterable[ProcessWorker], seconds: float) -> None:
        """Wait until one of them has ended, or so long."""
        wait([worker.sentinel for worker in workers], timeout=seconds)

    def close(self) -> None:
        """Do nothing: nothing is held."""


class ProcessWorker:
    """The process that does one cell."""

    def __init__(
        self, context: Any, cell: Cell, sources: Sources, test: bool, threads: int, log: Path
    ) -> None:
        """Start it.

        Args:
            context: Makes processes.
            cell: The cell.
            sources: Other runs that make the same stages.
            test: Whether its policy is scored on the test tasks too.
            threads: Threads of a process for numerical work.
            log: File to which all it prints is added.
        """
        self.cell, self.began = cell, time.monotonic()
        self._said, theirs = context.Pipe(duplex=False)
        work = (cell, sources, test, threads, str(log), dict(os.environ), theirs)
        self._process = context.Process(target=_work, args=work, name=cell.recipe.name)
        self._process.start()
        theirs.close()

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, however."""
        return not self._process.is_alive()

    @property
    def sentinel(self) -> int:
        """File descriptor that is ready when the process has ended."""
        return int(self._process.sentinel)

    def error(self) -> str | None:
        """Return why it failed, once it has ended; None: it did not."""
        self._process.join()
        try:
            said: str | None = self._said.recv()
        except EOFError:  # it said nothing, so it was killed
            number = self._process.exitcode
            how = f"by signal {-number}" if number is not None and number < 0 else f"with exit code {number}"
            said = f"its process ended {how}; if memory was short, fewer workers need less."
        self._said.close()
        return said

    def stop(self) -> None:
        """Ask it to stop, as Ctrl-C does."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGINT)

    def end(self, seconds: float = _GRACE_SECONDS) -> None:
        """Wait for it so long, then kill it and all that it has started."""
        self._process.join(seconds)
        if self._process.is_alive():
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.join()


def _work(
    cell: Cell,
    sources: Sources,
    test: bool,
    threads: int,
    log: str,
    environment: Mapping[str, str],
    said: Connection,
) -> None:
    """Run a cell in a new process, and say why it failed, or None."""
    os.setsid()
    gc.freeze()  # what was imported is never collected, and looking through it takes longer than many a stage
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    said.send(do_logged(cell, sources, test, threads, log))


def _die_with_parent() -> None:
    """End this process and all that it has started when the study has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def do_logged(cell: Cell, sources: Sources, test: bool, threads: int, log: str) -> str | None:
    """Do a cell with its output in a file; why it failed, or None."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    locate("torch:set_num_threads")(threads)
    try:
        do_cell(cell, sources, test)
    except PerturnError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  of worlds and libraries of others; a cell that fails stops no other
        traceback.print_exc()
        return f"{type(error).__name__}: {told(error)} (in full: {log})"
    return None


def do_cell(cell: Cell, sources: Sources, test: bool) -> None:
    """Run the missing stages of a cell, copying stages that other runs have done; then score it, if asked."""
    with open_run(cell.recipe) as run:
        run_stages(run, take_over=lambda stage: take_over(run, stage, sources))
        model = policy_path(run, cell.policy)
    if test:
        forget_stale(cell)
        with open_run(cell.scoring_recipe(model)) as scored:
            note_scored(cell)
            run_stages(scored)
