"""Temporary folders that the next process removes if their process was killed."""

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
"""Name of the file that is locked as long as the folder's process lives."""


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder of this process. If this process is killed, a later process removes the folder."""
    return tempfile.TemporaryDirectory(dir=_own(os.getpid()), prefix="", ignore_cleanup_errors=True)


@cache
def _own(process: int) -> Path:
    """Return a folder that this process locks until it ends, and remove the folders of dead processes.

    Threads that call this function at the same time get different folders.
    """
    for other in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(Timeout, OSError), FileLock(other, blocking=False):  # alive, or another user's
            shutil.rmtree(other.parent, ignore_errors=True)
    while True:
        own = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = FileLock(own / _LOCK, blocking=False, thread_local=False)
        # An error means that another process or thread removed the folder before it was locked.
        with suppress(Timeout, FileNotFoundError):
            lock.acquire()
        if lock.is_locked and (own / _LOCK).exists():
            atexit.register(_remove, own, process, lock)  # the registration also keeps the lock alive
            return own


def _remove(own: Path, process: int, lock: FileLock) -> None:
    """Remove the folder of a process when the process ends, but not when a fork of it ends."""
    if os.getpid() == process:
        shutil.rmtree(own, ignore_errors=True)
        lock.release()
