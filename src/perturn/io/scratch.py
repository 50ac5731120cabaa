"""Temporary folders that a killed process does not leave for good: the next process removes them."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

_PREFIX = "perturn-scratch-"
_LOCK = "lock"
"""File that is locked as long as the process of a folder lives."""


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder of this process; if the process is killed, a later one removes the folder."""
    return tempfile.TemporaryDirectory(dir=_own(os.getpid()), prefix="", ignore_cleanup_errors=True)


@cache
def _own(process: int) -> Path:
    """Return a folder that this process holds until it ends; remove folders of processes that are gone.

    Threads that ask at the same time get their own folders.
    """
    for other in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(Timeout, OSError), FileLock(other, blocking=False):  # it lives, or is another user's
            shutil.rmtree(other.parent, ignore_errors=True)
    while True:
        own = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = FileLock(own / _LOCK, blocking=False, thread_local=False)
        # An error: another process or thread took the folder, before it was locked, for a folder to remove.
        with suppress(Timeout, FileNotFoundError):
            lock.acquire()
        if lock.is_locked and (own / _LOCK).exists():
            atexit.register(_remove, own, process, lock)  # which holds the lock that long
            return own


def _remove(own: Path, process: int, lock: FileLock) -> None:
    """Remove the folder of a process when it ends, and not when a fork of it ends."""
    if os.getpid() == process:
        shutil.rmtree(own, ignore_errors=True)
        lock.release()
