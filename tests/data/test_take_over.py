"""A stage that another run has finished is taken over: its files, note and seals, or nothing of it."""

import json
import os
from dataclasses import replace

import pytest

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.data.file_seals import find_damage
from perturn.data.run_folder import Run
from perturn.errors import RunError
from perturn.io.atomic_write import write_whole


@pytest.fixture
def runs(tmp_path):
    """One run that has done `sft`, and after it `explore`; and an empty one."""
    recipe = parse(
        Recipe,
        {
            "name": "one",
            "output": str(tmp_path / "runs"),
            "model": {"name": "m"},
            "environment": {"name": "e"},
            "protocol": {"name": "p"},
            "sft": {"loss": {"name": "sft"}},
            "explore": {},
        },
    )
    one, two = Run(recipe), Run(replace(recipe, name="two"))
    make(one, "sft", "weights", {"1": "a"})
    make(one, "explore", "episodes", {"2": "b"})
    yield one, two
    for run in (one, two):
        run.close()


def made(run, stage):
    """The files of a stage, as far as the test goes."""
    if stage == "sft":
        return [run.paths.checkpoint("sft") / "model.safetensors", run.paths.metrics("sft")]
    return [run.paths.trajectories("explore")]


def make(run, stage, text, tokens):
    """Do a stage."""
    files = made(run, stage)
    with run.stage(stage, files[0].parent if stage == "sft" else files[0], *files[1:]) as counts:
        for file in files:
            write_whole(file, text)
        noted = json.loads(run.paths.tokens.read_text()) if run.paths.tokens.is_file() else {}
        write_whole(run.paths.tokens, json.dumps(noted | tokens))
        write_whole(run.paths.stamp, "{}")
        counts["examples"] = 7


def test_files_note_and_seals_are_the_other_runs(runs):
    """The weights are one file on the disk; `perturn verify` of the run would find nothing wrong."""
    one, two = runs

    assert two.take_over("sft", one.folder)

    for file, its in zip(made(two, "sft"), made(one, "sft"), strict=True):
        assert os.path.samefile(file, its)
    note = two.manifest["stages"]["sft"]
    assert note == {**one.manifest["stages"]["sft"], "taken_from": "one"}
    assert two.is_done("sft")
    assert find_damage(two.folder, two.manifest["files"], thorough=True) == []
    assert {each["stage"] for each in two.manifest["files"].values()} == {"sft", None}
    assert json.loads(two.paths.manifest.read_text()) == two.manifest


def test_texts_of_tokens_are_joined(runs):
    """A report reads them, and they are no stage's alone; the run's own stay."""
    one, two = runs
    write_whole(two.paths.tokens, json.dumps({"3": "c"}))

    two.take_over("sft", one.folder)

    assert json.loads(two.paths.tokens.read_text()) == {"1": "a", "2": "b", "3": "c"}
    assert not two.paths.stamp.exists()  # it is of evaluations


def test_what_is_not_done_is_not_taken(runs):
    one, two = runs

    assert not two.take_over("align", one.folder)
    assert not two.take_over("sft", one.folder.with_name("nowhere"))
    assert two.manifest["stages"] == {}


def test_a_stage_is_taken_only_with_the_files_that_it_was_made_from(runs):
    """Episodes of another SFT policy are none of this run's, though the settings are the same."""
    one, two = runs
    make(two, "sft", "other weights", {})

    assert not two.take_over("explore", one.folder, equal=["sft"])
    assert not made(two, "explore")[0].exists()
    assert two.take_over("explore", one.folder)


def test_a_stage_of_which_the_run_has_deleted_a_file_is_not_taken(runs):
    """As the state of critics, which the other run needs no more, and this run's next iteration would read."""
    one, two = runs
    one.delete([one.paths.metrics("sft")])

    assert not two.take_over("sft", one.folder)
    assert not made(two, "sft")[0].exists()


def test_damage_is_not_taken_over(runs):
    one, two = runs
    made(one, "sft")[0].write_text("nonsense")

    with pytest.raises(RunError, match="was written with"):
        two.take_over("sft", one.folder)
    assert not two.is_done("sft")


def test_a_stage_done_again_in_one_run_leaves_the_other_as_it_was(runs):
    """Files are written whole and put in the place of the old ones, so a link is never written through."""
    one, two = runs
    two.take_over("sft", one.folder)
    for file in made(two, "sft"):
        file.unlink()
    two.reopen("sft")

    make(two, "sft", "new weights", {})

    assert [file.read_text() for file in made(one, "sft")] == ["weights", "weights"]
    assert find_damage(one.folder, one.manifest["files"], thorough=True) == []


def test_a_disk_without_links_holds_copies(runs, monkeypatch):
    one, two = runs

    def refused(*_):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refused)

    assert two.take_over("sft", one.folder)
    assert [file.read_text() for file in made(two, "sft")] == ["weights", "weights"]
    assert find_damage(two.folder, two.manifest["files"]) == []


def test_a_stage_with_a_removed_file_is_not_taken_over(runs):
    """A checkpoint may be removed to save disk space; the stage is then made again."""
    one, two = runs
    made(one, "sft")[0].unlink()

    assert not two.take_over("sft", one.folder)
    assert not two.is_done("sft")
    assert two.take_over("explore", one.folder)
