"""Run each cell in a process of its own.

On Linux, the processes are forked from a server process that has imported the training code. Forking saves the imports,
which take longer than a small cell. On other systems, a fork of a process that has imported torch may crash.

Each process has its own session, so that Ctrl-C in a terminal interrupts only the study, which then stops its cells. A
cell's process ends whenever the process of the study ends.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
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
from perturn.io.plain_data import named_error
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
"""Modules that the fork server imports in advance."""
_GRACE_SECONDS = 20.0
"""Time that a process gets to write a checkpoint and stop, in seconds."""


def allowed(threads: int) -> int:
    """Return a number of threads, or the limit that `OMP_NUM_THREADS` sets if it is lower."""
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return min(threads, int(limit)) if limit.isdecimal() and int(limit) else threads


class Processes:
    """Pool of processes on this machine, of limited size."""

    def __init__(self, size: int, threads: int) -> None:
        """Prepare the pool."""
        self._size, self._threads = size, allowed(threads)
        self._free_gb = psutil.virtual_memory().available / 1e9
        method = "forkserver" if sys.platform == "linux" else "spawn"
        self._context: Any = multiprocessing.get_context(method)
        self._context.set_forkserver_preload(list(_IMPORTED))

    def most(self, peak_gb: float) -> int:
        """Return how many cells may run at the same time, if each needs `peak_gb` of memory; 0 means unknown."""
        return max(1, min(self._size, int(self._free_gb / peak_gb))) if peak_gb else self._size

    def start(self, cell: Cell, sources: Sources, test: bool, log: Path) -> ProcessWorker:
        """Start a cell in a new process."""
        return ProcessWorker(self._context, cell, sources, test, self._threads, log)

    def wait(self, workers: Iterable[ProcessWorker], seconds: float) -> None:
        """Wait until one of the workers has ended, at most this number of seconds."""
        wait([worker.sentinel for worker in workers], timeout=seconds)

    def close(self) -> None:
        """Do nothing, since the pool holds no resources between cells."""


class ProcessWorker:
    """Process that runs one cell."""

    def __init__(
        self, context: Any, cell: Cell, sources: Sources, test: bool, threads: int, log: Path
    ) -> None:
        """Start the process.

        Args:
            context: Multiprocessing context that creates the process.
            cell: The cell.
            sources: Other runs that share stages with the cell.
            test: Whether the cell's policy is also scored on the test tasks.
            threads: Number of threads for numerical work.
            log: File to which the output of the process is appended.
        """
        self.cell, self.began = cell, time.monotonic()
        self._said, theirs = context.Pipe(duplex=False)
        work = (cell, sources, test, threads, str(log), dict(os.environ), theirs)
        self._process = context.Process(target=_work, args=work, name=cell.recipe.name)
        self._process.start()
        theirs.close()

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, with or without an error."""
        return not self._process.is_alive()

    @property
    def sentinel(self) -> int:
        """File descriptor that becomes ready when the process ends."""
        return int(self._process.sentinel)

    def error(self) -> str | None:
        """Return the error of a process that has ended; None if it succeeded."""
        self._process.join()
        try:
            said: str | None = self._said.recv()
        except EOFError:  # the process sent no message, so it was killed
            number = self._process.exitcode
            how = f"by signal {-number}" if number is not None and number < 0 else f"with exit code {number}"
            said = f"its process ended {how}; if memory was short, fewer workers need less."
        self._said.close()
        return said

    def stop(self) -> None:
        """Interrupt the process, as Ctrl-C does."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGINT)

    def end(self, seconds: float = _GRACE_SECONDS) -> None:
        """Wait this number of seconds for the process, then kill it and its child processes."""
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
    """Run a cell in the new process, and send its error, or None, to the study."""
    os.setsid()
    gc.freeze()  # imported objects are never collected, and scanning them takes longer than many stages
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    said.send(do_logged(cell, sources, test, threads, log))


def _die_with_parent() -> None:
    """Kill this process and its child processes when the study's process ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def do_logged(cell: Cell, sources: Sources, test: bool, threads: int, log: str) -> str | None:
    """Run a cell with its output in a file. Return its error, or None."""
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
        return f"{named_error(error)} (in full: {log})"
    return None


def do_cell(cell: Cell, sources: Sources, test: bool) -> None:
    """Run the missing stages of a cell, or copy them from other runs. Then score its policy if `test` is set."""
    with open_run(cell.recipe) as run:
        run_stages(run, take_over=lambda stage: take_over(run, stage, sources))
        model = policy_path(run, cell.policy)
    if test:
        forget_stale(cell)
        with open_run(cell.scoring_recipe(model)) as scored:
            note_scored(cell)
            run_stages(scored)
