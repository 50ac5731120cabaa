"""Temporary folders of processes that end, and of processes that are killed."""

import subprocess
import sys

import pytest

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
