"""Inputs from outside a run folder: a changed one is never taken for the one that the run was made from."""

import json
import os
import shutil
from pathlib import Path

import pytest

from perturn.cli import main
from perturn.data import input_digests
from perturn.data.cache_folders import content_digest
from perturn.data.file_seals import file_digest, own_digest, read_manifest
from perturn.data.run_folder import Run, resolve_recipe
from perturn.errors import ConfigError, RunError
from perturn.estimate.dry_run import make_plan
from perturn.measure.measure_run import Wanted, forecast_run, measure_run
from perturn.run.execute import open_run, run_stages
from perturn.run.recorded_inputs import note_inputs, refuse_changed
from perturn.run.verify_run import verify
from support.inputs import edited, made, noted, recipe_of


def test_the_manifest_has_the_digest_of_each_input(beside):
    """Of each file of a model that a policy depends on; README and hidden files are none."""
    (beside / "base" / "README.md").write_text("hello")

    folder = made(recipe_of(), "pair", "align")

    manifest = read_manifest(folder)
    pairs = manifest["inputs"]["rows.path"]["files"]["pairs.jsonl"]
    assert pairs["sha256"] == file_digest(beside / "pairs.jsonl")
    assert noted(folder)["model.name"] == sorted(set(os.listdir("base")) - {"README.md"})
    assert manifest["sha256"] == own_digest(manifest)


@pytest.mark.parametrize(
    ("file", "setting"),
    [
        ("pairs.jsonl", "rows.path"),
        ("base/model.safetensors", "model.name"),
        ("base/tokenizer.json", "model.name"),
    ],
)
def test_an_edited_input_is_rejected_by_every_command(beside, file, setting):
    """With its setting, both digests and the remedies; also where all is done."""
    folder = made(recipe_of(), "pair", "align")
    before = file_digest(beside / file)
    edited(file)
    says = (
        f"{setting}: {Path(file).name} changed since this run was made \\(sha256 {before[:12]}… → "
        f"{file_digest(beside / file)[:12]}…\\): restore the file, or give the run another name \\(name=...\\), or "
        f"remove runs/aligned to make it anew"
    )

    for command in (None, "pair", "train"):
        with pytest.raises(RunError, match=says):
            open_run(folder, [], command)
        with pytest.raises(RunError, match=says):
            make_plan(folder, [], command)
    for measure in (measure_run, forecast_run):
        with pytest.raises(RunError, match=says):
            measure(folder, Wanted())


def test_a_measurement_tells_another_revision_of_the_model(beside, monkeypatch, capsys):
    """A model of the Hub has no files among the inputs, so nothing else would say it."""
    revisions = iter(["first", "second"])
    monkeypatch.setattr("perturn.run.recorded_inputs._revision", lambda name: next(revisions))
    folder = made(recipe_of(model={"name": "org/on-the-hub"}), "pair", "align")

    with pytest.raises(ConfigError, match="explore is missing"):
        measure_run(folder, Wanted())
    assert "is at revision second in the cache; this run was made with first" in capsys.readouterr().err


def test_the_same_content_is_no_change_whatever_its_time(beside, monkeypatch):
    """A touched file is read once; then its new time is noted, and no file is read."""
    folder = made(recipe_of(), "pair", "align")
    os.utime("pairs.jsonl", ns=(1, 1))
    open_run(folder).close()

    assert read_manifest(folder)["inputs"]["rows.path"]["files"]["pairs.jsonl"]["modified_ns"] == 1
    monkeypatch.setattr(input_digests, "content_digest", lambda *_: pytest.fail("a file was read"))
    open_run(folder).close()


@pytest.mark.slow
def test_a_change_that_keeps_size_and_time_is_seen(beside):
    """As `cp -p` and `tar` keep them, in place or behind a link."""
    status = os.stat("pairs.jsonl")
    shutil.copy2("pairs.jsonl", "first.jsonl")
    os.replace("pairs.jsonl", "second.jsonl")
    os.symlink("first.jsonl", "pairs.jsonl")
    folder = made(recipe_of(), "pair", "align")
    edited("second.jsonl")
    os.utime("second.jsonl", ns=(status.st_atime_ns, status.st_mtime_ns))
    os.unlink("pairs.jsonl")
    os.symlink("second.jsonl", "pairs.jsonl")

    with pytest.raises(RunError, match=r"rows\.path: pairs\.jsonl changed since"):
        open_run(folder)


def test_a_digest_that_is_kept_is_not_that_of_another_content(beside):
    """Of a large file: its size and the time of its content are the same."""
    before, status = content_digest(beside / "games.json"), os.stat("games.json")
    edited("games.json")
    os.utime("games.json", ns=(status.st_atime_ns, status.st_mtime_ns))

    assert content_digest(beside / "games.json") == file_digest(beside / "games.json") != before


def test_new_and_missing_files_of_a_model_are_changes(beside):
    folder = made(recipe_of(), "pair", "align")
    (beside / "base" / "extra.json").write_text("{}")

    with pytest.raises(RunError, match=r"extra\.json is new since this run was made"):
        open_run(folder)
    (beside / "base" / "extra.json").unlink()
    (beside / "base" / "tokenizer.json").unlink()
    with pytest.raises(RunError, match=r"tokenizer\.json is gone since this run was made"):
        open_run(folder)


def test_an_input_that_nothing_reads_any_more_may_go(beside):
    """Pairs are in the run once the stage pair is done; the model is read by what is left to do."""
    folder = made(recipe_of(), "pair")
    (beside / "pairs.jsonl").unlink()
    open_run(folder).close()
    shutil.rmtree(beside / "base")

    with pytest.raises(
        RunError, match=r"model\.name: base is gone.*stage align is still to read it: restore it"
    ):
        open_run(folder)
    shutil.rmtree(folder)


def test_a_finished_run_needs_none_of_its_inputs(beside, capsys):
    """Each of its stages is done before."""
    folder = made(recipe_of(), "pair", "align")
    for gone in ("base", "pairs.jsonl"):
        (shutil.rmtree if Path(gone).is_dir() else os.unlink)(gone)

    with open_run(folder) as run:
        run_stages(run)

    assert capsys.readouterr().err.splitlines() == ["pair: done before", "align: done before"]


def test_from_another_directory_relative_paths_are_looked_for_where_they_were(
    beside, tmp_path_factory, monkeypatch
):
    """A finished run is done; an edited file is found there; a stage that would read it says where to go."""
    folder, begun = made(recipe_of(), "pair", "align").absolute(), made(recipe_of(name="begun")).absolute()
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    open_run(folder).close()

    with pytest.raises(RunError, match=f"run the command from where 'base' is a path to {beside / 'base'}"):
        open_run(begun)
    edited(beside / "pairs.jsonl")
    with pytest.raises(RunError, match=r"rows\.path: pairs\.jsonl changed since"):
        open_run(folder)


def test_another_file_of_the_same_name_is_a_change(beside, tmp_path_factory, monkeypatch):
    """An equal copy is none."""
    folder, other = made(recipe_of(), "pair", "align").absolute(), tmp_path_factory.mktemp("elsewhere")
    shutil.copy("pairs.jsonl", other)
    monkeypatch.chdir(other)
    refuse_changed(resolve_recipe(folder))
    edited("pairs.jsonl")

    with pytest.raises(RunError, match=rf"is a path to {beside / 'pairs.jsonl'}, or restore the file"):
        open_run(folder)


def test_adapters_have_their_model_too(beside):
    """Both folders are inputs."""
    Path("adapters").mkdir()
    Path("adapters/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "base"}))

    folder = made(recipe_of(model={"name": "adapters"}))

    assert noted(folder)["model.name"] == ["adapter_config.json"]
    assert "model.safetensors" in noted(folder)["model.name (base of the adapters)"]


def test_report_and_verify_name_a_changed_input(beside, capsys, monkeypatch):
    """The results of a run folder are still what they were; verify finds a change with the old size and time too."""
    folder = made(recipe_of(), "pair", "align")
    assert verify(folder).changed_inputs == []
    status = os.stat("pairs.jsonl")
    edited("pairs.jsonl")
    os.utime("pairs.jsonl", ns=(status.st_atime_ns, status.st_mtime_ns))

    assert (
        verify(folder).changed_inputs[0].startswith("rows.path: pairs.jsonl changed since this run was made")
    )
    assert verify(folder).damaged == []
    os.utime("pairs.jsonl")
    monkeypatch.setattr("sys.argv", ["perturn", "report", str(folder)])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "pairs.jsonl changed since this run was made" in capsys.readouterr().err


def test_a_stage_is_not_taken_over_from_a_run_with_other_inputs(beside):
    """Settings are the same, the file is not."""
    theirs = made(recipe_of(name="theirs"), "pair")
    edited("pairs.jsonl")
    with Run(recipe_of(name="ours")) as run:
        note_inputs(run)

        assert not run.take_over("pair", theirs)
        shutil.rmtree(theirs)
        assert run.take_over("pair", made(recipe_of(name="theirs"), "pair"))


def test_several_gpus_are_rejected_before_any_work(beside, monkeypatch):
    """By `run`, `train` and `--dry-run`, and by a run of which only the training is left; not where all is done."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    folder, done = made(recipe_of(name="begun"), "pair"), made(recipe_of(), "pair", "align")

    for source in (recipe_of(name="new"), folder):
        for refused in (
            lambda source=source: open_run(source),
            lambda source=source: make_plan(source, [], "train"),
        ):
            with pytest.raises(ConfigError, match=r"2 GPUs.*launch.processes=2.*CUDA_VISIBLE_DEVICES=0"):
                refused()
    assert not Path("runs/new").exists()
    open_run(folder, [], "pair").close()
    open_run(done).close()
