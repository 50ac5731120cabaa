"""Temporary folders of processes that end, and of processes that are killed."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

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


def test_threads_that_ask_at_once_keep_their_folders(start, tmp_path, monkeypatch):
    """Sixteen first calls at the same time: nobody removes a folder of another, nor does the next process."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_own", cache(scratch._own.__wrapped__))
    monkeypatch.setattr(shutil, "rmtree", _slow(shutil.rmtree))
    monkeypatch.setattr(FileLock, "acquire", _slow(FileLock.acquire))
    meet = threading.Barrier(16)

    def ask(_):
        meet.wait()
        return scratch.scratch_folder()

    with ThreadPoolExecutor(16) as threads:
        folders = list(threads.map(ask, range(16)))
    start()
    gone = [each.name for each in folders if not Path(each.name).exists()]
    for each in folders:
        each.cleanup()

    assert gone == []


def test_a_folder_that_another_process_is_removing_is_not_taken(tmp_path, monkeypatch):
    """Its lock is held, and its file is there still: the next folder is this process's own."""
    names = [tmp_path / "perturn-scratch-1", tmp_path / "perturn-scratch-2"]
    for each in names:
        each.mkdir()
    made = iter(names)
    monkeypatch.setattr(scratch.tempfile, "mkdtemp", lambda prefix: str(next(made)))
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(tmp_path / "empty"))

    with FileLock(names[0] / "lock"):
        assert scratch._own.__wrapped__(os.getpid()) == names[1]


def _slow(call):
    """Let other threads work before and after a call."""

    def slow(*given, **named):
        time.sleep(0.001)
        got = call(*given, **named)
        time.sleep(0.001)
        return got

    return slow
