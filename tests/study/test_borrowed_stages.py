"""Stages that another study has finished are taken over where they would be made the same."""

import json
import logging
from pathlib import Path

import pytest

from perturn.config.parsing import to_yaml
from perturn.config.recipe import read_recipe
from perturn.data.file_seals import seal
from perturn.data.input_digests import gather, record
from perturn.data.run_paths import RunPaths
from perturn.errors import ConfigError
from perturn.io.atomic_write import write_whole
from perturn.study.cells import Plan
from perturn.study.run_study import open_study, run_study
from perturn.study.settings import read_study
from perturn.study.stage_sharing import held_stages
from perturn.study.study_display import summary_line
from perturn.study.study_progress import Board

from .corridor import RECIPE, STUDY, make_place

WORDS = ("seeds=[0]", "sweep={}", "tune=null")


@pytest.fixture
def board(tmp_path):
    """Makes the board of the study `name` in an empty place."""
    (tmp_path / "corridor.yaml").write_text(RECIPE)
    (tmp_path / "study.yaml").write_text(STUDY)

    def make(name, *words):
        words = (f"name={name}", f"output={tmp_path}", *WORDS, *words)
        return Board(Plan(*read_study(tmp_path / "study.yaml", words)))

    return make


def lend(board, method="tlm-dre", *, done=(), begun=()):
    """The run of a method as if it had done some stages and begun others; its folder."""
    cell = next(cell for cell, _ in board.cells() if cell.method == method)
    paths, files = RunPaths(cell.folder), {}
    write_whole(paths.recipe, to_yaml(cell.recipe))
    for stage in done:
        file = cell.folder / f"{stage}.jsonl"
        write_whole(file, "x\n")
        files |= seal(cell.folder, [file], stage)
    notes = {stage: {"done": stage in done} for stage in (*done, *begun)}
    write_whole(paths.manifest, json.dumps({"stages": notes, "files": files}))
    return cell.folder


def sources(board, method="dpo"):
    """Stage -> names of the other studies that the run of a method may take it over from."""
    cell = next(cell for cell, _ in board.cells() if cell.method == method)
    found = board.sharing.sources(cell)
    return {stage: {each.folder.parts[-3] for each in found[stage]} - {"two"} for stage in found}


def refusal(call, *arguments):
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return str(caught.value)


def test_what_is_the_same_and_finished_is_taken_over(board):
    """Both losses learn from one SFT; the alignment is another, and SFT is begun and not finished in a third."""
    lend(board("one"), done=("expert", "sft", "align"))
    lend(board("three"), done=("expert",), begun=("sft",))

    found = sources(board("two", "share=[one, three]"))

    assert (found.pop("expert"), found.pop("sft")) == ({"one", "three"}, {"one"})
    assert set(found) == {"explore", "pair", "align"}
    assert not any(found.values())


def test_what_was_removed_is_not_there(board):
    folder = lend(board("one"), done=("expert", "sft"))
    (folder / "sft.jsonl").unlink()

    assert sources(board("two", "share=[one]"))["sft"] == set()


def test_a_stage_that_lacks_one_of_its_files_is_not_there(board):
    """As where checkpoints were removed to have room: to take it over would be refused as damage."""
    folder = lend(board("one"), done=("expert", "sft"))
    manifest = RunPaths(folder).manifest
    more = folder / "metrics.jsonl"
    more.write_text("x\n")
    noted = json.loads(manifest.read_text())
    noted["files"] |= seal(folder, [more], "sft")
    manifest.write_text(json.dumps(noted))
    assert held_stages(folder) == {"expert", "sft"}

    more.unlink()

    assert held_stages(folder) == {"expert"}


@pytest.mark.parametrize(
    ("word", "lent"),
    [
        ("expert.file: e.jsonl", set()),
        ("rows: {name: file, path: p.jsonl}", {"expert", "sft", "explore"}),
        ("model.name: ./policy", {"expert"}),
        ("model.name: local", {"expert"}),
        ("model.name: org/policy", {"expert", "sft", "explore", "pair"}),
    ],
)
def test_what_reads_files_of_the_user_is_not_lent(board, tmp_path, monkeypatch, word, lent):
    """A file of one path may hold other rows by now, and a folder another model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local").mkdir()
    methods = f"methods={{tlm-dre: {{{word}}}, dpo: {{{word}, align.loss: {{name: dpo}}}}}}"
    stages = ("expert", "sft", "explore", "pair", "align")
    lend(board("one", methods), done=stages)

    found = sources(board("two", "share=[one]", methods))

    assert {stage for stage in found if "one" in found[stage]} == lent


def test_other_settings_make_another_stage(board):
    lend(board("one", "methods.tlm-dre={sft.epochs: 3}"), done=("expert", "sft"))

    found = sources(board("two", "share=[one]"))

    assert (found["expert"], found["sft"]) == ({"one"}, set())


def test_nobody_waits_for_what_another_study_does(board):
    """Expert and SFT are not to be made; what the other study has only begun is."""
    lend(board("one"), done=("expert", "sft"), begun=("explore",))

    found = board("two", "share=[one]")
    cell = next(cell for cell, _ in found.cells() if cell.method == "dpo")

    assert cell.stages == ["expert", "sft", "explore", "pair", "align"]
    assert len(found.sharing.to_make(cell)) == 3


def test_the_counts_say_what_is_there_already(board):
    """Three runs of 2 + 5 + 5 stages; both losses share all but the alignment, and sft has an expert of its own."""
    alone = board("two")
    lend(board("one"), done=("expert", "sft"))

    shared = board("two", "share=[one]")

    assert "with 12 stages, of which 7 are computed and the others are shared" in summary_line(alone)
    assert "with 12 stages, of which 5 are computed, 2 are copied from one and the others" in summary_line(
        shared
    )


def test_stages_are_lent_while_their_inputs_are_unchanged(board, tmp_path):
    """The expert does not read the model; where nothing is recorded, a model in a folder may be another."""
    model = f"model.name={tmp_path / 'model'}"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "corridor.yaml").write_text(to_yaml(read_recipe(tmp_path / "corridor.yaml", [model])))
    folder = lend(board("one"), done=("expert", "sft"))
    found = [sources(board("two", "share=[one]"))]

    manifest = json.loads(RunPaths(folder).manifest.read_text())
    files = gather(tmp_path / "model", [tmp_path / "model" / "config.json"])
    noted = record(str(tmp_path / "model"), "model", files)
    write_whole(RunPaths(folder).manifest, json.dumps({**manifest, "inputs": {"model.name": noted}}))
    found.append(sources(board("two", "share=[one]")))
    (tmp_path / "model" / "config.json").write_text('{"changed": 1}')
    found.append(sources(board("two", "share=[one]")))

    assert [(each["expert"], each["sft"]) for each in found] == [
        ({"one"}, set()),
        ({"one"}, {"one"}),
        ({"one"}, set()),
    ]


def test_a_study_without_runs_is_no_source(board):
    """A typing error would cost the hours that sharing saves."""
    lend(board("one"), done=("sft",))

    said = refusal(board, "two", "share=[won]")

    assert said.startswith("share: study 'won' has no runs in ")
    assert said.endswith("Did you mean 'one'? Known: one.")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("share=[two]", "share names the study itself, 'two'"),
        ("share=[../one]", "share must name a folder, got '../one'"),
        ("share=['']", "share must name a folder, got ''"),
        ("share=[..]", "share must name a folder, got '..'"),
    ],
)
def test_names_that_are_refused(board, words, said):
    assert said in refusal(board, "two", words)


def test_a_recipe_that_cannot_be_read_is_named(board, caplog):
    """As of an older version; the other runs are taken over."""
    folder = lend(board("one"), "sft", done=("sft",))
    lend(board("one"), "dpo", done=("expert",))
    recipe = RunPaths(folder).recipe
    recipe.write_text(recipe.read_text() + "gone: 1\n")

    with caplog.at_level(logging.WARNING):
        found = sources(board("two", "share=[one]"))

    assert (found["expert"], found["sft"]) == ({"one"}, set())
    assert (
        f"nothing is taken over from {folder}, whose recipe cannot be read: unknown key 'gone'."
        in caplog.text
    )


@pytest.mark.slow
def test_a_second_study_begins_with_the_stages_of_the_first(tmp_path, tiny_folder, monkeypatch):
    """Episodes are one file on the disk, and the note in the manifest names their run.

    The model is a local folder. Its digest says that it is unchanged, so stages that read it are taken over as well.
    """
    make_place(tmp_path, tiny_folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    file, words = Path("study.yaml"), [*WORDS, "test.tasks.per_kind=1"]
    run_study(open_study(file, ["name=one", "methods={tlm-dre: {}}", *words]), workers=1)

    run_study(
        open_study(file, ["name=two", "methods={dpo: {align.loss: {name: dpo}}}", "share=[one]", *words]), 1
    )

    second = next(Path("studies/two/runs").glob("dpo-seed-0-????????"))
    notes = json.loads(RunPaths(second).manifest.read_text())["stages"]
    lender = (RunPaths(second).folder.parent / notes["expert"]["taken_from"]).resolve()
    assert lender.parent == (tmp_path / "studies" / "one" / "runs")
    episodes = [RunPaths(each).trajectories("expert") for each in (lender, second)]
    assert episodes[0].samefile(episodes[1])
    taken = {stage for stage, note in notes.items() if "one/runs" in note.get("taken_from", "")}
    assert taken == {"expert", "sft", "explore", "pair"}


def test_a_study_whose_runs_are_gone_lends_nothing(board, caplog):
    """Its results alone are left."""
    one = board("one")
    write_whole(one.plan.study.folder / "cells.json", "[]")

    shared = board("two", "share=[one]")

    assert "0 are copied from one" in summary_line(shared)
    assert "the runs of study one are gone, so nothing is taken over from it" in caplog.text


def test_a_removed_stage_of_another_cell_is_made_by_one_cell(board):
    """A stage that wrote no file counts as it did."""
    folder = lend(board("two"), done=("expert", "sft"))
    (folder / "sft.jsonl").unlink()
    noted = json.loads(RunPaths(folder).manifest.read_text())
    noted["stages"]["explore"] = {"done": True}
    write_whole(RunPaths(folder).manifest, json.dumps(noted))

    found = board("two")
    cell = next(cell for cell, _ in found.cells() if cell.method == "dpo")

    assert len(found.sharing.to_make(cell)) == 3  # sft, pair and align
