"""A study from its file to its results."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import yaml

from perturn.data.run_lock import RunLock
from perturn.display.progress_bars import console
from perturn.io.atomic_write import write_whole, writing
from perturn.study.cell_processes import Processes
from perturn.study.cluster_cells import Nodes
from perturn.study.rescore import open_plan
from perturn.study.run_cells import Conductor, Crew
from perturn.study.settings import Study
from perturn.study.study_checks import check_study
from perturn.study.study_display import Screen
from perturn.study.study_files import Files, write_results
from perturn.study.study_progress import Board
from perturn.study.tables.study_page import write_study_page
from perturn.table import locate


def open_study(file: Path, overrides: Sequence[str] = ()) -> Board:
    """Read a study and see how far it is; nothing is written."""
    board = Board(open_plan(file, overrides))
    board.kept.refuse_loss(board.cells())
    check_study(board.plan.study, board.possible(), trains_here=board.plan.cluster is None)
    return board


def run_study(board: Board, workers: int | None = None) -> Path:
    """Do the cells that are not done, and write the study's results, also of what there is after Ctrl-C; then its page.

    Args:
        board: Of the study.
        workers: Cells at the same time; None: as the study says.

    Returns:
        The page.

    Raises:
        InUseError: If another process works on the study.
    """
    study = board.plan.study
    files = Files(study.folder)
    with writing(study.folder):
        files.logs.mkdir(parents=True, exist_ok=True)
    lock, screen = RunLock(study.folder), Screen(console)
    try:
        _write_study(files, study)
        with screen.shown(board):
            Conductor(board, _crew(board, workers or study.workers), files, screen.tell).run()
    finally:
        write_results(files, board)
        lock.release()
    return write_study_page(study.folder)


def _write_study(files: Files, study: Study) -> None:
    """Keep the study with its defaults."""
    write_whole(files.study, yaml.safe_dump(dataclasses.asdict(study), sort_keys=False))


def _crew(board: Board, workers: int | None) -> Crew:
    """Return who does the cells: the nodes of the recipe's cluster, or this machine."""
    if board.plan.cluster is not None:
        return Nodes(board.plan.cluster, board.plan.study.folder, workers)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    size = workers or (cores if locate("perturn.policy.models:device")().type == "cpu" else 1)
    return Processes(size, max(1, cores // size))
