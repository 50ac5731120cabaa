"""Scores belong to the weights that were scored; how the processes of cells start."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from perturn.study import cell_results
from perturn.study.cell_processes import Processes, allowed, do_cell
from perturn.study.cell_results import forget_stale, is_done
from perturn.study.cells import Plan
from perturn.study.settings import read_study

from .corridor import make_place


def interrupted(folder):
    """A removal that is killed before it removes anything."""
    raise KeyboardInterrupt


def test_a_policy_with_other_weights_is_scored_again(tmp_path, tiny_folder, monkeypatch):
    """The cell's run is removed, and made again with weights that hash to something else."""
    make_place(tmp_path, tiny_folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    cell = Plan(*read_study(Path("study.yaml"))).cell("perturn_corridor-Corridor", "sft", {}, 1)
    do_cell(cell, {}, True)
    assert is_done(cell, "test")
    scored = cell.scored / "manifest.json"
    before = scored.stat().st_mtime_ns
    note = cell.scored / "scored.json"
    note.write_text(json.dumps(dict.fromkeys(json.loads(note.read_text()), "other")))
    shutil.rmtree(cell.folder)

    do_cell(cell, {}, False)
    assert not is_done(cell, "test")
    with monkeypatch.context() as patch:
        patch.setattr(cell_results.shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            forget_stale(cell)
    assert not scored.exists()
    assert not is_done(cell, "test")
    do_cell(cell, {}, True)

    assert is_done(cell, "test")
    assert scored.stat().st_mtime_ns != before


@pytest.mark.parametrize(("system", "method"), [("linux", "forkserver"), ("darwin", "spawn")])
def test_a_process_that_has_imported_torch_is_forked_on_linux_only(monkeypatch, system, method):
    monkeypatch.setattr(sys, "platform", system)

    assert Processes(1, 1)._context.get_start_method() == method


@pytest.mark.parametrize(("limit", "threads"), [("1", 1), ("8", 4), ("", 4), ("0", 4), ("2,1", 2)])
def test_a_cell_has_no_more_threads_than_the_variable_allows(monkeypatch, limit, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", limit)

    assert allowed(4) == threads
