"""Files are written whole or not at all, and a full disk is an error that says what to do."""

import os
import subprocess
import sys
from contextlib import suppress
from shutil import copytree, disk_usage

import pytest
import torch

from perturn import TurnConfig, TurnTrainer
from perturn.chat.model_names import load_tokenizer
from perturn.cli import main
from perturn.data.file_seals import seal
from perturn.data.store import TrajectoryStore, write_pairs
from perturn.errors import ModelError, StorageError
from perturn.io.atomic_write import append_line, remove_strays, replacing, write_whole
from perturn.policy import reference
from perturn.policy.models import load_model
from perturn.run.execute import open_run
from perturn.types import Action, PreferencePair, Task, Trajectory, Turn

RECIPE = """
name: one
output: {output}
model: {{name: "{model}", dtype: float32}}
environment: {{name: "own_environment:GuessNumber"}}
protocol: {{name: tiny, format: action, system: Guess., max_turns: 5}}
sft: {{loss: {{name: sft}}, tasks: {{per_kind: 4}}}}
explore: {{tasks: {{per_kind: 4, skip: 4}}}}
align: {{loss: {{name: tlm-dre}}}}
worlds: {{processes: 0}}
"""


def mounted(folder, megabytes):
    """A file system of its own, which is full before anything else is; skips where none may be mounted."""
    folder.mkdir()
    try:
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
        subprocess.run(command, check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no small file system can be mounted here: {error}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=10)


@pytest.fixture
def small_disk(tmp_path):
    """One megabyte."""
    yield from mounted(tmp_path / "disk", 1)


@pytest.fixture
def larger_disk(tmp_path):
    """Room for several checkpoints of the tiny policy."""
    yield from mounted(tmp_path / "disk", 128)


def fill(disk):
    """Take all the space there is; removing the file frees it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


def trajectory(name, text="a"):
    turn = Turn(({"role": "user", "content": "go"},), Action(text))
    return Trajectory(Task(name), (turn,), "world", "rules", ({"role": "system", "content": "s"},))


LONG = "x" * 2_000_000
WRITERS = {
    "text": lambda path: write_whole(path, LONG),
    "pairs": lambda path: write_pairs(path, [PreferencePair(trajectory("a", LONG), trajectory("a"))]),
    "reference": lambda path: reference._save(path, [torch.zeros(1_000_000)]),
    "line": lambda path: append_line(path, LONG),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_old_file_and_nothing_half_written(small_disk, name):
    """Two or four megabytes do not fit into one."""
    path = small_disk / "file"
    path.write_text("old\n")

    with pytest.raises(
        StorageError, match=rf"{path} cannot be written: .*space.*then give the same command"
    ) as caught:
        WRITERS[name](path)

    assert caught.value.__cause__ is not None
    assert path.read_text() == "old\n"
    assert [each.name for each in small_disk.iterdir()] == ["file"]


def test_a_full_disk_leaves_whole_lines_in_a_store(small_disk):
    """The second trajectory does not fit; once there is space it is recorded."""
    with TrajectoryStore(small_disk / "t.jsonl") as store:
        store.append(trajectory("a"))
        with pytest.raises(StorageError, match="No space left on device; free space"):
            store.append(trajectory("b", LONG))
    with TrajectoryStore(small_disk / "t.jsonl") as store:
        store.append(trajectory("b"))

        assert [one.key for one in store] == [("a", 0), ("b", 0)]


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    """An exception in the middle leaves the old one; then the new one has its own files alone."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "old").write_text("old")

    def write(error):
        with replacing(folder) as fresh:
            fresh.mkdir()
            (fresh / "new").write_text("new")
            if error:
                raise error

    with pytest.raises(KeyError):
        write(KeyError("x"))
    assert [each.name for each in folder.iterdir()] == ["old"]
    write(None)
    assert [each.name for each in folder.iterdir()] == ["new"]
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_another_process_made_meanwhile_stays(tmp_path):
    """Of a cache, where both hold the same; whoever reads the first is not disturbed."""
    folder = tmp_path / "index"

    with replacing(folder, once=True) as fresh:
        fresh.mkdir()
        (fresh / "data").write_text("second")
        folder.mkdir()
        (folder / "data").write_text("first")

    assert (folder / "data").read_text() == "first"
    assert [each.name for each in tmp_path.iterdir()] == ["index"]


def test_what_a_kill_left_half_written_is_removed(tmp_path):
    """Its name says so; the trainer's `sft.partial` and files of users have other names."""
    stray = f".manifest.json.{'0' * 32}.partial"
    for name in (stray, "sft.partial", ".mine.partial"):
        (tmp_path / name).write_text("")

    remove_strays(tmp_path)

    assert sorted(each.name for each in tmp_path.iterdir()) == [".mine.partial", "sft.partial"]


def test_appended_lines_are_on_the_disk_before_their_file_is_sealed(tmp_path, monkeypatch):
    """After a power failure, the seal of a file with fewer lines would look like damage."""
    file, synced = tmp_path / "sft.jsonl", []
    append_line(file, "{}")
    monkeypatch.setattr(os, "fsync", lambda opened: synced.append(os.fstat(opened).st_ino))

    seal(tmp_path, [file], "sft")

    assert synced == [file.stat().st_ino]


@pytest.fixture
def perturn(monkeypatch, capsys):
    """The command in this process; its exit code and what it printed as errors."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["perturn", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
        return caught.value.code or 0, capsys.readouterr().err

    return call


def test_a_run_on_a_full_disk_stops_with_one_line_and_goes_on_with_space(
    small_disk, tiny_folder, own_environment, tmp_path, perturn
):
    """The disk fills up before the folder is made, and after; no traceback, no half-written file, and code 2."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(output=small_disk / "runs", model=tiny_folder))
    filler = fill(small_disk)
    first = perturn("collect", recipe)
    filler.unlink()
    (small_disk / "runs" / "one").mkdir(parents=True, exist_ok=True)
    write_whole(small_disk / "runs" / "one" / "recipe.yaml", "")
    (small_disk / "runs" / "one" / "recipe.yaml").unlink()
    fill(small_disk)
    second = perturn("collect", recipe)
    left = [path for path in (small_disk / "runs").rglob("*") if path.name.endswith(".partial")]
    filler.unlink()

    third = perturn("collect", recipe)

    for code, said in (first, second):
        assert code == 2
        assert "No space left on device" in said
        assert "Traceback" not in said
    assert left == []
    assert third[0] == 0


def test_an_error_of_a_stage_is_not_hidden_by_a_full_disk(
    small_disk, tiny_folder, own_environment, tmp_path, caplog
):
    """The stage raised; that its end cannot be written down comes second."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(output=small_disk / "runs", model=tiny_folder))

    def fail(run):
        with run.stage("expert"):
            fill(small_disk)
            raise ValueError("the real one")

    with open_run(recipe) as run, pytest.raises(ValueError, match="the real one"):
        fail(run)

    assert "manifest.json cannot be written: No space left on device" in caplog.text


def trainer(folder, disk, tmp_path):
    message = {"role": "user", "content": "go"}
    rows = [{"messages": [message, {"role": "assistant", "content": f"north {i}"}]} for i in range(4)]
    args = TurnConfig(
        output_dir=str(disk / "out"), loss="sft", use_cpu=True, report_to=[], disable_tqdm=True, save_steps=1,
        save_total_limit=1, max_steps=3, per_device_train_batch_size=1, reference_cache=str(tmp_path / "cache"),
    )  # fmt: skip
    return TurnTrainer(str(folder), args, rows)


@pytest.mark.slow
def test_training_on_a_full_disk_removes_the_half_written_checkpoint_and_goes_on_with_space(
    larger_disk, tiny_folder, tmp_path
):
    """The first checkpoint fits, the second does not; it makes room again, and training resumes from the first."""
    trainer(tiny_folder, tmp_path, tmp_path).train()
    checkpoint = sum(path.stat().st_size for path in (tmp_path / "out" / "checkpoint-3").iterdir())
    (larger_disk / "filler").write_bytes(bytes(disk_usage(larger_disk).free - 3 * checkpoint // 2))

    with pytest.raises(StorageError, match=r"checkpoint-2 cannot be written"):
        trainer(tiny_folder, larger_disk, tmp_path).train()
    left = [path.name for path in (larger_disk / "out").iterdir()]
    (larger_disk / "filler").unlink()
    state = trainer(tiny_folder, larger_disk, tmp_path).train(resume_from_checkpoint=True)

    assert left == ["checkpoint-1"]
    assert state.global_step == 3


def test_a_damaged_checkpoint_is_an_error_for_the_user(tiny_folder, tmp_path):
    """Cut or overwritten, its optimizer's state or its weights; the folder to remove is named."""
    one = trainer(tiny_folder, tmp_path, tmp_path)
    one.train()
    for file in ("optimizer.pt", "model.safetensors"):
        damaged = tmp_path / "out" / "checkpoint-3" / file
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:100])
        with pytest.raises(ModelError, match=r"checkpoint-3' cannot be read: .*Remove that folder"):
            trainer(tiny_folder, tmp_path, tmp_path).train(resume_from_checkpoint=True)
        damaged.write_bytes(whole)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_policy_is_an_error_for_the_user(tiny_folder, tmp_path, file):
    """Overwritten with what is none of it."""
    folder = tmp_path / "policy"
    copytree(tiny_folder, folder)
    (folder / file).write_bytes(b"\x00damaged")

    with pytest.raises(ModelError, match=r"cannot be loaded"):
        (load_tokenizer if file == "tokenizer.json" else load_model)(str(folder))


def test_a_file_never_replaces_a_folder(tmp_path):
    """`perturn report --output runs` would otherwise remove every run there is."""
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("name: one")

    with pytest.raises(StorageError, match="runs cannot be written: Is a directory; correct the path"):
        write_whole(tmp_path / "runs", "<html>")
    assert (run / "recipe.yaml").read_text() == "name: one"
    assert [each.name for each in tmp_path.iterdir()] == ["runs"]
