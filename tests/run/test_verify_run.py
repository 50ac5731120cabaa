"""Damage to finished stages is seen, before a report or a run relies on it."""

import json
import os
import re
import shutil
import sys

import pytest

from perturn.cli import main
from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.data.records import trajectory_to_dict
from perturn.data.run_folder import Run
from perturn.data.store import TrajectoryStore
from perturn.errors import RunError
from perturn.estimate.dry_run import make_plan
from perturn.io.atomic_write import write_whole
from perturn.report import summarize
from perturn.run.execute import open_run, run_stages
from perturn.run.verify_run import verify
from perturn.types import Action, Task, Trajectory, Turn


def episode(task, reward):
    turn = Turn(({"role": "user", "content": "go"},), Action("on"), reward=reward)
    prompt = ({"role": "system", "content": "s"},)
    return Trajectory(Task(task, "k"), (turn,), "w", "rules", prompt, total_reward=reward, terminated=True)


@pytest.fixture
def folder(tmp_path, own_environment, tiny_folder):
    """A run with two finished evaluations, an SFT policy of one file, and the texts of tokens."""
    data = {
        "name": "one",
        "output": str(tmp_path),
        "model": {"name": str(tiny_folder)},
        "environment": {"name": "own_environment:GuessNumber"},
        "protocol": {"name": "tiny", "format": "action", "system": "Guess.", "max_turns": 5},
        "sft": {"loss": {"name": "sft"}},
        "align": {"loss": {"name": "tlm-dre"}},
        "worlds": {"processes": 0},
    }
    with Run(parse(Recipe, data)) as run:
        write_whole(run.folder / "tokens.json", '{"1": "a"}\n')
        with run.stage("expert", run.paths.trajectories("expert")) as counts:
            run.paths.trajectories("expert").write_text(
                json.dumps(trajectory_to_dict(episode("t/0", 1.0))) + "\n"
            )
            counts["episodes"] = 1
        with run.stage("sft", run.paths.checkpoint("sft")):
            write_whole(run.paths.checkpoint("sft") / "model.safetensors", "weights")
        for policy, reward in (("base", 0.0), ("sft", 1.0)):
            with run.stage(f"evaluate-{policy}", run.paths.evaluation(policy)) as counts:
                with TrajectoryStore(run.paths.evaluation(policy)) as store:
                    for number in range(6):
                        store.append(episode(f"t/{number}", reward))
                counts["episodes"] = 6
    return run.folder


def empty(file):
    file.write_bytes(b"")


def cut(file):
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:3]))


def flip(file):
    """One byte is another; the size stays."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def remove(file):
    file.unlink()


@pytest.mark.parametrize("harm", [empty, cut, flip, remove])
def test_a_damaged_evaluation_is_no_result(folder, harm):
    """Emptied, its policy vanished from the table; cut, it had n = 3 under a caption of 6."""
    assert [row["n"] for row in summarize(folder)["policies"]] == [6, 6]
    harm(folder / "evaluation" / "sft.jsonl")

    with pytest.raises(RunError, match=r"evaluation/sft\.jsonl (has|is gone).*Restore.*perturn verify"):
        summarize(folder)


@pytest.mark.parametrize("harm", [empty, flip])
@pytest.mark.parametrize(
    "file",
    ["evaluation/sft.jsonl", "trajectories/expert.jsonl", "checkpoints/sft/model.safetensors", "tokens.json"],
)
def test_a_run_does_not_go_on_from_damage(folder, harm, file):
    """Whatever the next command would do."""
    harm(folder / file)

    for go_on in (open_run, lambda folder: make_plan(folder, [], None)):
        with pytest.raises(RunError, match=rf"{file} has .* `perturn verify {folder}` names what to remove"):
            go_on(folder)


def test_a_copied_run_is_whole(folder, tmp_path):
    """Its files have other times, so they are hashed."""
    copy = shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)

    open_run(copy).close()

    assert summarize(copy)["policies"] == summarize(folder)["policies"]
    assert verify(copy).damaged == []


def call(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["perturn", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code or 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "file",
    [
        "recipe.yaml",
        "manifest.json",
        "tokens.json",
        "evaluation/base.jsonl",
        "trajectories/expert.jsonl",
        "checkpoints/sft/model.safetensors",
    ],
)
def test_verify_sees_every_byte(folder, file, monkeypatch, capsys):
    """A flipped bit, even where size and time are as they were; it writes nothing."""
    well, printed = call(monkeypatch, capsys, "verify", str(folder))
    status = (folder / file).stat()
    text = (folder / file).read_text()
    place = text.find('"episodes": ') + 12  # in the manifest, a count
    if file != "manifest.json":
        place = next(at for at in range(len(text) // 2, len(text)) if text[at].isalnum())
    (folder / file).write_text(f"{text[:place]}{chr(ord(text[place]) ^ 1)}{text[place + 1 :]}")
    os.utime(folder / file, ns=(status.st_atime_ns, status.st_mtime_ns))
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))

    damaged, found = call(monkeypatch, capsys, "verify", str(folder), "--json")

    assert (well, damaged) == (0, 1)
    assert "6 of 6 finished files are undamaged" in printed.replace("\n", " ")
    assert [one["file"] for one in json.loads(found)["damaged"]] == [file]
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before


def test_the_remedy_has_the_stage_made_again(folder):
    """The evaluation alone is removed as `verify` says, and is then to do; nothing else is."""
    file = folder / "evaluation" / "sft.jsonl"
    empty(file)
    remedies = verify(folder).remedies

    file.unlink()
    with open_run(folder) as run:
        done = [stage for stage in run.manifest["stages"] if run.is_done(stage)]

    assert len(remedies) == 1
    assert f"rm -r {file} && perturn run {folder}" in remedies[0]
    assert done == ["expert", "sft", "evaluate-base"]


def test_the_remedy_works_as_it_is_written_where_files_are_gone_already(folder):
    """`rm` of a file that is not there fails, and what follows `&&` would never be done."""
    shutil.rmtree(folder / "checkpoints" / "sft")
    (folder / "trajectories" / "expert.jsonl").unlink()

    first = verify(folder).remedies[0]
    removal = re.search(r"rm -r (.*) && perturn run", first)[1]

    assert removal == f"{folder}/evaluation/sft.jsonl"


def test_where_nothing_is_left_to_remove_the_remedy_is_to_run(folder):
    (folder / "evaluation" / "base.jsonl").unlink()

    assert verify(folder).remedies[0].endswith(f"all that follows from it: perturn run {folder}")


@pytest.mark.parametrize("file", ["../../mine", "/etc/passwd", "checkpoints/../../mine", "", ".", "a\0b"])
def test_a_manifest_of_others_names_no_file_outside_its_folder(folder, file):
    """`verify` would tell its reader to remove it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][file] = manifest["files"]["evaluation/sft.jsonl"]
    (folder / "manifest.json").write_text(json.dumps(manifest))

    for read in (verify, open_run, summarize):
        with pytest.raises(RunError, match="must be a path inside the run folder"):
            read(folder)


@pytest.mark.parametrize("note", [{}, {"counts": None, "seconds": None, "peak_memory_gb": None}])
def test_a_note_of_a_stage_may_lack_what_it_measured(folder, note):
    """As another version may have written it: the stage is done again, and its time begins at 0."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["stages"]["expert"] = {"done": True, **note}
    manifest["stages"]["explore"] = {"done": False, **note}
    (folder / "manifest.json").write_text(json.dumps(manifest))

    with open_run(folder) as run:
        run_stages(run, "pair")
        with run.stage("explore"):
            pass

        assert run.manifest["stages"]["expert"]["counts"] == {}
        assert run.manifest["stages"]["explore"]["seconds"] < 60


def test_what_was_made_from_a_removed_stage_is_not_kept(folder):
    """The SFT policy is gone, but its evaluation is there: that of which policy?"""
    shutil.rmtree(folder / "checkpoints" / "sft")

    with pytest.raises(
        RunError, match=rf"sft is to be done again, but evaluate-sft .*rm -r {folder}/evaluation/sft"
    ):
        open_run(folder)

    (folder / "evaluation" / "sft.jsonl").unlink()
    with open_run(folder) as run:
        assert not run.is_done("sft")


def test_what_a_running_stage_writes_is_not_damage(folder):
    """Its own file and those that stages share change under it; after a kill the next call goes on."""

    def stop(run):
        with run.stage("evaluate-tlm-dre", run.paths.evaluation("tlm-dre")):
            write_whole(folder / "tokens.json", '{"1": "b"}\n')
            raise KeyboardInterrupt

    with open_run(folder) as run, pytest.raises(KeyboardInterrupt):
        stop(run)

    assert verify(folder).damaged == []
    open_run(folder).close()


def test_a_folder_without_seals_cannot_be_verified(tmp_path):
    with pytest.raises(RunError, match="is no run folder"):
        verify(tmp_path)
    (tmp_path / "recipe.yaml").write_text("")
    with pytest.raises(RunError, match="no sealed file to verify"):
        verify(tmp_path)
