"""A study whose runs are gone: the rows that it has left count, and what is new is made."""

import json
import shutil

import pytest

from perturn.data.input_digests import gather, record
from perturn.data.run_paths import RunPaths
from perturn.errors import ConfigError, RunError
from perturn.io.atomic_write import write_whole
from perturn.study.cells import Plan
from perturn.study.run_cells import Conductor
from perturn.study.run_study import _write_study
from perturn.study.settings import read_study
from perturn.study.study_checks import refuse_changed_inputs
from perturn.study.study_display import summary_line
from perturn.study.study_files import Files, write_results
from perturn.study.study_progress import Board
from perturn.study.tables.episode_table import EPISODES, read_episodes, write_episodes
from perturn.study.tables.study_records import protocols_of
from perturn.study.tables.verdicts import summarize
from support.pretended import Pretended, PretendedCrew, states

from .corridor import RECIPE, STUDY


@pytest.fixture
def opened(tmp_path):
    """Opens the board of the study with words over its file."""
    (tmp_path / "corridor.yaml").write_text(RECIPE)
    (tmp_path / "study.yaml").write_text(STUDY)

    def do(*words):
        return Board(Plan(*read_study(tmp_path / "study.yaml", [f"output={tmp_path}", *words])))

    return do


@pytest.fixture
def done(opened, tmp_path):
    """Opens the board and has its cells done; the board, and the cells that were begun."""

    def do(*words):
        board, crew = opened(*words), PretendedCrew()
        crew.begun.append([])
        Conductor(board, crew, Files(tmp_path / "whole"), lambda _: None).run()
        write_results(Files(tmp_path / "whole"), board)
        return board, [cell for begun in crew.begun for cell in begun]

    return do


@pytest.fixture
def left(done, tmp_path):
    """Folder of a study that was done, with its rows and without its runs."""
    done()
    shutil.rmtree(tmp_path / "whole" / "runs")
    return tmp_path / "whole"


def texts(folder):
    return [(folder / name).read_bytes() for name in ("cells.json", EPISODES, "protocols.json")]


def test_nothing_is_made_again(left, done):
    before = texts(left)
    board, begun = done()

    assert begun == []
    assert set(states(board).values()) == {"done"}
    assert board.chosen["perturn_corridor-Corridor", "dpo"] == {"align.learning_rate": 0.01}
    assert texts(left) == before
    assert json.loads(before[0])
    assert "0 runs with 0 stages" in summary_line(board)
    assert (
        f"The run folders of {len(states(board))} cells were deleted in whole or in part; their scores still count."
        in summary_line(board)
    )


def test_a_further_seed_is_made_alone(left, done):
    before = json.loads((left / "cells.json").read_text())
    board, begun = done("seeds=[0,1,2]")
    rows = json.loads((left / "cells.json").read_text())

    assert {cell.seed for cell in begun} == {2}
    assert len(begun) == len({row["method"] for row in rows})
    assert set(states(board).values()) == {"done"}
    assert [row for row in rows if row["seed"] < 2] == before
    played = read_episodes(left / EPISODES)
    assert {row["seed"] for row in played} == {0, 1, 2}


def test_a_further_method_is_made_alone(left, done):
    _, begun = done("methods.dil={align.loss: {name: dil}}")

    assert {cell.method for cell in begun} == {"dil"}


def test_a_shared_stage_that_another_machine_made_again_is_told(left, done, monkeypatch):
    """The rows of the methods name unequal weights of the SFT that they share; only what is tested counts."""
    _write_study(Files(left), read_study(left.parent / "study.yaml")[0])
    said = "The stage sft was trained more than once, with other weights each time"
    dil, nat = "methods.dil={align.loss: {name: dil}}", "methods.nat={align.loss: {name: nat}}"

    done(dil)
    (same,) = summarize(left)["environments"].values()
    monkeypatch.setattr(Pretended, "weights", "2" * 64)
    done(dil, nat, "seeds=[0]")
    (other,) = summarize(left)["environments"].values()

    assert not any(said in note for note in same["notes"])
    (found,) = (note.rpartition(": ")[2] for note in other["notes"] if said in note)
    assert found == "(sft seed 0, dpo seed 0, tlm-dre seed 0, dil seed 0) and (nat seed 0)."


def chosen(board, method="dpo"):
    return next(cell for cell, task_list in board.cells() if cell.method == method and task_list == "test")


def test_a_run_that_was_begun_again_changes_nothing(left, done, opened):
    """Its rows hold until it is finished, whether its folder is there or not."""
    before, cell = texts(left), chosen(opened())
    write_whole(cell.folder / "manifest.json", json.dumps({"stages": {}}))
    board, begun = done()

    assert begun == []
    assert set(states(board).values()) == {"done"}
    assert texts(left) == before


def test_a_finished_run_speaks_for_itself(left, done, opened):
    """The policy is there again, and its score is not: that alone is made."""
    cell = chosen(opened())
    Pretended(cell, test=False, fails=False).error()
    found = states(opened())
    assert [key for key, state in found.items() if state == "to do"] == [("dpo", 0.01, 0, "test")]

    board, begun = done()
    assert [one.folder for one in begun] == [cell.folder]
    assert set(states(board).values()) == {"done"}


def test_a_finished_cell_whose_code_has_changed_is_an_error(done, tmp_path):
    """Its results are those of other code, so a study must not compare them with new ones."""
    board, _ = done()
    cell = next(cell for cell, task_list in board.cells() if task_list == "test")
    code = tmp_path / "own_credit.py"
    code.write_text("weight = 1\n")
    noted = record(f"{code}:Own", "code", gather(tmp_path, [code]))
    manifest = json.loads((cell.folder / "manifest.json").read_text())
    write_whole(cell.folder / "manifest.json", json.dumps(manifest | {"inputs": {"credit.name": noted}}))
    cells = [cell for cell, _ in board.cells()]
    refuse_changed_inputs(cells)
    code.write_text("weight = 2\n")

    with pytest.raises(
        RunError, match=r"credit.name: .*own_credit.py.* changed .* give the study another name"
    ):
        refuse_changed_inputs(cells)
    code.unlink()
    refuse_changed_inputs(cells)


def test_policies_alone_may_go(done, tmp_path):
    """The small runs that score them stay."""
    board, _ = done()
    for cell, _ in board.cells():
        shutil.rmtree(cell.folder, ignore_errors=True)
    before = texts(tmp_path / "whole")
    again, begun = done()

    assert begun == []
    assert set(states(again).values()) == {"done"}
    assert texts(tmp_path / "whole") == before


def test_a_run_that_a_test_needs_again_and_that_is_stopped_loses_nothing(left, opened):
    """The tuning row of SFT is kept, its test is to do, and its run is begun when the study is stopped."""
    rows = json.loads((left / "cells.json").read_text())
    without = [row for row in rows if (row["method"], row["panel"], row["seed"]) != ("sft", "test", 0)]
    (left / "cells.json").write_text(json.dumps(without))
    board = opened()
    cell = chosen(board, "sft")
    assert states(board)["sft", 0, "test"] == "to do"
    write_whole(cell.folder / "manifest.json", json.dumps({"stages": {}}))
    board.ended(cell, None)
    write_results(Files(left), board)
    shutil.rmtree(left / "runs")

    assert states(opened())["sft", 0, "tune"] == "done"
    assert opened().kept.outcomes(cell, "tune")


def test_other_tuning_is_refused(left, opened):
    """A point more, so that the one that was tested may not be chosen any more."""
    board = opened("sweep={align.learning_rate: [1.0e-3, 1.0e-2, 1.0e-1]}")

    with pytest.raises(ConfigError, match="that this study does not have, or not yet, the first dpo seed 0"):
        board.kept.refuse_loss(board.cells())


@pytest.mark.parametrize("cut", [lambda file: file.unlink(), lambda file: write_episodes(file, [])])
def test_rows_without_their_episodes_are_told(left, done, cut):
    cut(left / EPISODES)

    with pytest.raises(
        RunError, match=r"episodes\.parquet has no row of .* is done and whose runs are gone; restore it"
    ):
        done()


def test_another_setting_is_another_cell(left, opened):
    """Every cell of seed 0 has it, and none of what was chosen or tested before is lost silently."""
    board = opened("methods.sft={align: null, sft.epochs: 9}")

    assert states(board)["sft", 0, "test"] == "to do"
    with pytest.raises(
        ConfigError,
        match=r"results of \d+ cells that this study does not have, or not yet, the first sft seed 0",
    ):
        board.kept.refuse_loss(board.cells())


def test_rows_that_would_be_lost_are_refused(left, opened):
    fewer, as_before = opened("seeds=[0]"), opened()
    as_before.kept.refuse_loss(as_before.cells())

    with pytest.raises(ConfigError, match="seed 1, and their runs are gone, so they would be lost"):
        fewer.kept.refuse_loss(fewer.cells())


def test_rows_whose_runs_are_there_may_go(done, opened):
    done()
    fewer = opened("seeds=[0]")
    fewer.kept.refuse_loss(fewer.cells())

    assert "gone" not in summary_line(fewer)


@pytest.mark.slow
def test_protocols_are_noted(done, left, opened):
    """Of the first cell of SFT there was a stamp, and nothing but the note knows it now."""
    cell = next(cell for cell, task_list in opened().cells() if cell.method == "sft" and task_list == "test")
    shutil.rmtree(left)
    done()
    write_whole(RunPaths(cell.scored).stamp, json.dumps({"split": "test", "seed": 0}))
    done()
    shutil.rmtree(left / "runs")
    done()

    noted = protocols_of(left, json.loads((left / "cells.json").read_text()))["perturn_corridor-Corridor"]
    assert noted["sft"] == {"split": "test"}
    assert noted["dpo"] == {}


def test_a_damaged_row_is_told(left, opened):
    (left / "cells.json").write_text('[{"method": "dpo"}]')

    with pytest.raises(RunError, match=r"cells\.json"):
        opened()
