"""Which cells are done when, and which point is chosen, seen with workers that only pretend."""

import json
import shutil

import pytest

from perturn.config.parsing import to_yaml
from perturn.errors import RunError
from perturn.study import run_cells
from perturn.study.cell_processes import do_cell
from perturn.study.cell_results import choose, is_done
from perturn.study.cells import Plan
from perturn.study.run_cells import Conductor
from perturn.study.settings import read_study
from perturn.study.study_files import Files, write_results
from perturn.study.study_progress import Board
from support.pretended import PretendedCrew, episode, states

from .corridor import RECIPE, STUDY


def test_the_point_with_the_best_mean_success_is_chosen():
    """2 of 3 beats 1 of 2; points that were not finished are not among them."""
    scores = [
        ({"a": 1}, [episode(True), episode(False)]),
        ({"a": 2}, [episode(True), episode(True), episode(False)]),
    ]

    assert choose(scores) == {"a": 2}


def test_of_equal_points_the_first_is_chosen():
    assert choose([({"a": 2}, [episode(True)]), ({"a": 1}, [episode(True)])]) == {"a": 2}


def test_without_a_finished_point_there_is_none():
    assert choose([]) is None


@pytest.fixture
def study(tmp_path):
    """Does the study with a crew; the board and the crew."""
    (tmp_path / "corridor.yaml").write_text(RECIPE)
    (tmp_path / "study.yaml").write_text(STUDY)

    def do(*fails):
        board = Board(Plan(*read_study(tmp_path / "study.yaml", [f"output={tmp_path}"])))
        crew = PretendedCrew(fails)
        conductor = Conductor(board, crew, Files(tmp_path / "whole"), lambda _: crew.begun.append([]))
        crew.begun.append([])
        conductor.run()
        write_results(conductor.files, board)
        return board, crew, conductor

    return do


def test_no_two_cells_that_would_make_the_same_are_at_work_together(study):
    """All of seed 0 need its base's score first, and the aligned ones its SFT; the two seeds share nothing."""
    board, crew, _ = study()

    together = [[(cell.method, cell.seed) for cell in begun] for begun in crew.begun if begun]
    assert together[0] == [("base", 0), ("base", 1), ("sft", 1)]
    assert together[1] == [("sft", 0)]
    assert together[2] == [("dpo", 0)]
    assert together[3] == [("dpo", 0), ("tlm-dre", 0), ("tlm-dre", 0)]
    assert set(states(board).values()) == {"done"}


def test_the_chosen_point_alone_is_tested_and_on_every_seed(study):
    board, _, _ = study()

    assert board.chosen["perturn_corridor-Corridor", "dpo"] == {"align.learning_rate": 0.01}
    tested = [key for key in states(board) if key[0] == "dpo" and key[-1] == "test"]
    assert tested == [("dpo", 0.01, 0, "test"), ("dpo", 0.01, 1, "test")]
    assert board.unknown == 0


def test_a_point_that_fails_on_a_seed_is_not_chosen(study):
    """The better one failed, so the other is; no other method is touched."""
    board, _, _ = study("dpo align.learning_rate=0.01")

    assert board.chosen["perturn_corridor-Corridor", "dpo"] == {"align.learning_rate": 0.001}
    assert board.chosen["perturn_corridor-Corridor", "tlm-dre"] == {"align.learning_rate": 0.01}
    assert states(board)["dpo", 0.01, 0, "tune"] == "failed"
    assert states(board)["dpo", 0.001, 1, "test"] == "done"


def test_a_method_without_a_point_has_failed_on_the_test_task_list(study, tmp_path):
    """A row for each seed says so."""
    study("dpo align")

    rows = json.loads((tmp_path / "whole" / "cells.json").read_text())
    failed = [row for row in rows if row["method"] == "dpo" and row["panel"] == "test"]
    assert [(row["seed"], row["state"], row["point"]) for row in failed] == [
        (0, "failed", {}),
        (1, "failed", {}),
    ]
    assert failed[0]["error"].startswith("no point of its sweep was finished")
    assert {row["error"] for row in rows if row["method"] == "dpo" and row["panel"] == "tune"} == {"it broke"}


def test_a_cell_whose_episodes_are_gone_is_not_done(study, tmp_path):
    """The folder of a score is removed while the study runs, before its results are written."""
    board, _, conductor = study()
    cell = next(cell for cell, task_list in board.cells() if task_list == "test" and cell.method == "sft")
    shutil.rmtree(cell.scored)
    (tmp_path / "whole" / "cells.json").unlink()

    write_results(conductor.files, board)

    rows = json.loads((tmp_path / "whole" / "cells.json").read_text())
    (lost,) = [row for row in rows if row["state"] != "done"]
    assert (lost["method"], lost["seed"], lost["panel"], lost["state"]) == (
        "sft",
        cell.seed,
        "test",
        "failed",
    )
    assert "its episodes are gone" in lost["error"]
    assert board.errors


def test_a_cell_whose_stage_was_removed_is_to_do(study):
    """All files of SFT are removed, so that the same command makes them again."""
    board, _, _ = study()
    cell = next(cell for cell, _ in board.cells() if cell.method == "sft")
    assert is_done(cell, "tune")

    shutil.rmtree(cell.folder / "checkpoints" / "sft")

    assert not is_done(cell, "tune")


def test_results_are_written_while_a_study_runs(study, tmp_path, monkeypatch):
    """At most once a minute; a run that is deleted afterwards still counts."""
    written, file = [], tmp_path / "whole" / "cells.json"

    def write(files, board):
        write_results(files, board)
        written.append({row["state"] for row in json.loads(file.read_text())})
        for row in json.loads(file.read_text()):
            for run in row["runs"] if row["state"] == "done" else ():
                shutil.rmtree(tmp_path / "whole" / run, ignore_errors=True)

    monkeypatch.setattr(run_cells, "write_results", write)
    board, _, _ = study()

    assert written == [{"done", "to do"}]
    assert set(states(board).values()) == {"done"}
    assert {row["state"] for row in json.loads(file.read_text())} == {"done"}


def test_a_cell_of_which_some_files_are_gone_fails_with_the_remedy_of_its_run(study):
    """Its run rejects the damage, so the cell is to do, and it is tried once."""
    board, _, _ = study()
    cell = next(cell for cell, _ in board.cells() if cell.method == "sft")
    manifest = json.loads((cell.folder / "manifest.json").read_text())
    seal = {"stage": "sft", "bytes": 1, "modified_ns": 1, "sha256": "1" * 64}
    manifest["files"]["checkpoints/sft/config.json"] = seal
    (cell.folder / "manifest.json").write_text(json.dumps(manifest))
    (cell.folder / "recipe.yaml").write_text(to_yaml(cell.recipe))
    assert not is_done(cell, "tune")

    with pytest.raises(RunError, match=r"Restore from a copy; or `perturn verify"):
        do_cell(cell, {}, False)


def test_a_failed_write_of_results_is_told_once_and_tried_again(study, monkeypatch, caplog):
    """A full disk stops no study, and the next write has what this one lacked."""
    left = [OSError("disk full"), OSError("disk full")]
    states_written = []

    def write(files, board):
        if left:
            raise left.pop()
        states_written.append(set(states(board).values()))

    monkeypatch.setattr(run_cells, "write_results", write)
    monkeypatch.setattr(run_cells, "_WRITE_SECONDS", 0.0)
    study()

    assert caplog.text.count("the results cannot be written yet: disk full") == 1
    assert states_written
