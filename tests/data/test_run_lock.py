"""One process at a time writes in a run folder."""

import errno
import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perturn.cli import main
from perturn.config.parsing import parse, to_yaml
from perturn.config.recipe import Recipe, read_recipe
from perturn.data.run_folder import Run
from perturn.data.run_lock import RunLock
from perturn.errors import InUseError, StorageError

HOLD = """
import sys
from pathlib import Path
from perturn.data.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def recipe(tmp_path):
    return parse(
        Recipe,
        {
            "name": "one",
            "output": str(tmp_path),
            "model": {"name": "smollm2-135m"},
            "environment": {"name": "scienceworld"},
            "protocol": {"name": "scienceworld-eto"},
            "sft": {"loss": {"name": "sft"}},
            "align": {"loss": {"name": "tlm-dre"}},
        },
    )


@pytest.fixture
def other(tmp_path):
    """Another process that has the run folder `one`."""
    folder = tmp_path / "one"
    folder.mkdir()
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_second_process_is_told_who_is_at_work(other, recipe, tmp_path):
    """It names the process and its machine, and makes nothing in the folder."""
    before = sorted(path.name for path in (tmp_path / "one").iterdir())

    with pytest.raises(InUseError) as caught:
        Run(recipe)

    assert f"process {other.pid} on {platform.node()} has been at work" in str(caught.value)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == before == [".holder", ".lock"]


def test_death_releases_the_folder(other, recipe):
    """Even kill -9, which leaves the holder's note behind; the next run writes its own."""
    other.send_signal(signal.SIGKILL)
    other.wait()

    with Run(recipe) as run:
        holder = json.loads((run.folder / ".holder").read_text())

    assert holder["pid"] == os.getpid()
    assert not (run.folder / ".holder").exists()


@pytest.mark.parametrize("command", ["collect", "pair", "train", "evaluate", "run"])
def test_every_command_that_writes_is_refused(other, recipe, monkeypatch, capsys, command):
    """Code 2 and one line; those that only read are not asked to wait."""
    folder = Path(recipe.output) / "one"
    (folder / "recipe.yaml").write_text(to_yaml(recipe))
    codes = []
    for words in ([command, str(folder)], ["watch", str(folder), "--once"]):
        monkeypatch.setattr(sys, "argv", ["perturn", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        codes.append(caught.value.code or 0)

    assert codes == [2, 0]
    assert f"is in use: process {other.pid}" in capsys.readouterr().err


def test_one_process_may_open_its_run_twice(recipe):
    """As a notebook does; the folder is free when both are closed."""
    first, second = Run(recipe), Run(recipe)
    first.close()
    script = HOLD.replace("sys.stdin.read()", "")
    command = [sys.executable, "-c", script, str(first.folder)]
    refused = subprocess.run(command, capture_output=True)
    second.close()

    assert b"InUseError" in refused.stderr
    assert subprocess.run(command, capture_output=True).stdout == b"held\n"


def test_of_processes_that_train_together_the_first_one_asks(other, tmp_path, monkeypatch):
    """`accelerate launch` and `torchrun` number them in RANK."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")

    RunLock(tmp_path / "one").release()

    assert json.loads((tmp_path / "one" / ".holder").read_text())["pid"] == other.pid


def test_a_kill_before_the_recipe_was_written_does_not_spoil_the_folder(other, recipe):
    """The lock's own files are nobody's notes."""
    other.send_signal(signal.SIGKILL)
    other.wait()

    with Run(recipe) as run:
        assert read_recipe(run.folder / "recipe.yaml") == recipe


@pytest.mark.parametrize(("number", "held"), [(errno.ENOLCK, False), (errno.ENOSPC, None)])
def test_a_file_system_without_locks_is_said_and_a_full_one_refused(
    recipe, tmp_path, monkeypatch, caplog, number, held
):
    """The first may still be written in, by whoever sees that nothing else is; the second may not."""

    def refuse(lock):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("filelock.FileLock._acquire", refuse)
    if held is None:
        with pytest.raises(
            StorageError, match=r"\.lock cannot be written: No space left on device; free space"
        ):
            Run(recipe)
        return
    Run(recipe).close()

    assert "no lock" in caplog.text
