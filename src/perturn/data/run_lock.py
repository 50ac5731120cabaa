"""The lock of a run folder: only one process at a time writes to the folder.

The locked file is empty. A second file names the process that holds the lock, for messages and for `perturn watch`. A
killed process leaves this second file behind.
"""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

from filelock import FileLock

from perturn.data.run_paths import RunPaths
from perturn.errors import InUseError
from perturn.io.atomic_write import take_lock, write_whole
from perturn.train_processes import holds_run


class RunLock:
    """Exclusive lock on a run folder, held until released, garbage-collected, or the process exits.

    A process may acquire the lock several times. Of processes that train together (`torchrun`, `accelerate launch`),
    only the first process acquires the lock, or the driver that started them.
    """

    def __init__(self, folder: Path) -> None:
        """Acquire the lock of a run folder.

        Raises:
            InUseError: If another process holds the lock.
            StorageError: If the folder cannot be written.
        """
        paths = RunPaths(folder)
        self._holder = paths.holder
        self._lock: FileLock | None = None
        if not holds_run():
            return
        lock = FileLock(paths.lock, timeout=0, thread_local=False, is_singleton=True, fallback_to_soft=False)
        if not take_lock(paths.lock, lock.acquire, lambda: InUseError(_in_use(paths))):
            return
        self._lock = lock
        if lock.lock_counter > 1:
            return
        facts = {"host": platform.node(), "pid": os.getpid(), "since": time.time()}
        try:
            write_whole(self._holder, json.dumps(facts) + "\n")
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            if self._lock.lock_counter == 1:
                with suppress(OSError):  # without the lock, readers ignore the note
                    self._holder.unlink(missing_ok=True)
            self._lock.release()
            self._lock = None


def _in_use(paths: RunPaths) -> str:
    """Return the message that names the process that holds the lock, and the remedy."""
    try:
        facts: dict[str, Any] = json.loads(paths.holder.read_text(encoding="utf-8"))
        since = time.strftime("%H:%M on %d %B", time.localtime(facts["since"]))
        who = f"process {facts['pid']} on {facts['host']} has been at work in it since {since}"
    except (OSError, ValueError, KeyError, TypeError):  # the process has just acquired or released the lock
        who = "another process is at work in it"
    return (
        f"{paths.folder} is in use: {who}; wait for its end, or stop it. "
        f"`perturn watch {quote(str(paths.folder))}` shows it; name=... makes another run."
    )
