"""Temporary folders of processes that end, and of processes that are killed."""

import os
import subprocess
import sys

import pytest
from filelock import FileLock

from perturn.io import scratch

HOLDS = """
import sys
from pathlib import Path
from perturn.io.scratch import scratch_folder
folder = scratch_folder()
(Path(folder.name) / "file").touch()
print(folder.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start processes that hold a folder until their input ends."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    started = []

    def start():
        command = [sys.executable, "-c", HOLDS]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.communicate()


def test_the_next_process_removes_what_a_killed_process_has_left(start, tmp_path):
    """Not the folders of a process that lives; at the end of all, nothing is there."""
    living, kept = start()
    killed, left = start()
    killed.kill()
    killed.communicate()
    found = {each.parent for each in tmp_path.rglob("file")}
    assert {str(each) for each in found} == {kept, left}

    last, own = start()

    assert {str(each.parent) for each in tmp_path.rglob("file")} == {kept, own}
    for process in (living, last):
        process.communicate()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_process_is_removing_is_not_taken(tmp_path, monkeypatch):
    """Its lock is held, and its file is there still: the next folder is this process's own."""
    names = [tmp_path / "perturn-scratch-1", tmp_path / "perturn-scratch-2"]
    for each in names:
        each.mkdir()
    made = iter(names)
    monkeypatch.setattr(scratch.tempfile, "mkdtemp", lambda prefix: str(next(made)))
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(tmp_path / "empty"))

    with FileLock(names[0] / "lock"):
        folder, lock = scratch._own.__wrapped__(os.getpid())
    assert (folder, lock.is_locked) == (names[1], True)
    lock.release()
