"""Run a study, from its file to its results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import yaml

from perturn.data.run_lock import RunLock
from perturn.display.progress_bars import console
from perturn.errors import check_fit
from perturn.io.atomic_write import write_whole, writing
from perturn.study.cell_processes import Processes
from perturn.study.cluster_cells import Nodes
from perturn.study.rescore import open_plan
from perturn.study.run_cells import Conductor, Crew
from perturn.study.settings import Study
from perturn.study.study_checks import check_study, refuse_changed_inputs
from perturn.study.study_display import Screen
from perturn.study.study_files import Files, write_results
from perturn.study.study_progress import Board
from perturn.study.tables.study_page import write_study_page
from perturn.table import locate
from perturn.train_processes import usable_cores


def open_study(file: Path, overrides: Sequence[str] = (), workers: int | None = None) -> Board:
    """Read a study and its progress, without writing any file.

    Args:
        file: The study file.
        overrides: Settings to change, as `key=value`.
        workers: Maximum number of cells at the same time. If None, the study's setting is used.
    """
    board = Board(open_plan(file, overrides))
    board.kept.refuse_loss(board.cells())
    refuse_changed_inputs(cell for cell, _ in board.cells())
    check_study(board.plan.study, board.possible(), trains_here=board.plan.cluster is None)
    cells_at_once(board, workers)
    return board


def run_study(board: Board, workers: int | None = None) -> Path:
    """Run the unfinished cells, and write the study's results and its page. Ctrl-C also writes the results.

    Args:
        board: The study and its progress.
        workers: Maximum number of cells at the same time. If None, the study's setting is used.

    Returns:
        The path of the page.

    Raises:
        InUseError: If another process runs the study.
        ConfigError: If this number of cells would share cores or GPUs.
    """
    study = board.plan.study
    files = Files(study.folder)
    with writing(study.folder):
        files.logs.mkdir(parents=True, exist_ok=True)
    lock, screen = RunLock(study.folder), Screen(console)
    try:
        _write_study(files, study)
        with screen.shown(board):
            Conductor(board, _crew(board, workers), files, screen.tell).run()
    finally:
        write_results(files, board)
        lock.release()
    return write_study_page(study.folder)


def _write_study(files: Files, study: Study) -> None:
    """Write the study's settings, including defaults."""
    write_whole(files.study, yaml.safe_dump(dataclasses.asdict(study), sort_keys=False))


def cells_at_once(board: Board, workers: int | None = None) -> int | None:
    """Return how many cells run at the same time; None if the resources of the cluster's nodes decide.

    Args:
        board: The study and its progress.
        workers: The value of `--workers`. If None, the study's setting is used. Without either, a machine without GPUs
            runs as many cells as give each training process a core. A machine with GPUs runs one cell at a time.

    Raises:
        ConfigError: If training processes of concurrent cells would share cores or GPUs.
    """
    study, cluster = board.plan.study, board.plan.cluster
    workers, trains = workers or study.workers, study.again is None
    processes = max((cell.recipe.launch.processes for cell in board.possible() if trains), default=1)
    if cluster is not None:
        gpus = cluster.engine_gpus
        name, given = ("engine_gpus", gpus) if gpus else ("engine_cpus", cluster.engine_cpus)
        must = f"be <= {given:g}, which cluster.{name} gives a cell"
        remedy = f"Set cluster.{name}={processes}, or launch.processes=1."
        check_fit(processes <= max(1, given), "launch.processes", must, processes, remedy)
        return workers
    cores, here = usable_cores(), locate("perturn.policy.models:device")().type
    if processes == 1:
        return workers or (cores if here == "cpu" else 1)
    most = max(1, cores // processes) if here == "cpu" else 1
    what = f"{cores} cores" if here == "cpu" else "GPUs of this machine, which all cells would train on"
    must = f"be <= {most}, since each has launch.processes={processes} on the {what}"
    check_fit(workers is None or workers <= most, "workers", must, workers, "Or set launch.processes=1.")
    return workers or most


def _crew(board: Board, workers: int | None) -> Crew:
    """Return the workers of the study: nodes of the recipe's cluster, or processes on this machine."""
    size = cells_at_once(board, workers)
    if board.plan.cluster is not None:
        return Nodes(board.plan.cluster, board.plan.study.folder, size)
    assert size is not None
    return Processes(size, max(1, usable_cores() // size))
