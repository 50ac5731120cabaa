"""The lock of a run folder: one process at a time writes in it.

Locked is an empty file. A second file next to it names the process that holds the lock, for messages and for watchers;
a killed process does not delete it.
"""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from perturn.data.run_paths import RunPaths
from perturn.errors import InUseError
from perturn.io.atomic_write import take_lock, write_whole
from perturn.train_processes import holds_run


class RunLock:
    """Exclusive lock on a run folder, held until released, garbage-collected, or the process exits.

    A process that asks twice gets it twice. Of the processes that train together (`torchrun`, `accelerate launch`) the
    first one asks for all, or the driver that started them.
    """

    def __init__(self, folder: Path) -> None:
        """Take the folder.

        Raises:
            InUseError: If another process has it.
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
        """Leave the folder to others."""
        if self._lock is not None:
            if self._lock.lock_counter == 1:
                with suppress(OSError):  # a note that is left says nothing while nobody has the lock
                    self._holder.unlink(missing_ok=True)
            self._lock.release()
            self._lock = None


def _in_use(paths: RunPaths) -> str:
    """Return the process that holds the folder, and the remedy."""
    try:
        facts: dict[str, Any] = json.loads(paths.holder.read_text(encoding="utf-8"))
        since = time.strftime("%H:%M on %d %B", time.localtime(facts["since"]))
        who = f"process {facts['pid']} on {facts['host']} has been at work in it since {since}"
    except (OSError, ValueError, KeyError, TypeError):  # it has just come, or goes
        who = "another process is at work in it"
    return (
        f"{paths.folder} is in use: {who}; wait for its end, or stop it. `perturn watch {paths.folder}` shows it; "
        "name=... makes another run."
    )
