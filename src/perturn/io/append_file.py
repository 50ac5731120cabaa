"""A file of lines that only grows, and that one process at a time writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from filelock import lock_descriptor

from perturn.io.atomic_write import append_whole, sync, take_lock, writing
from perturn.io.read_input import Refusal, complete_lines


class GrowingFile:
    """Open for appending and locked, until `close` or until we die; whoever reads it is not asked to wait."""

    def __init__(self, path: Path, refusal: Refusal, read: Callable[[], object]) -> None:
        """Open the file, making it and its folder if there is none, and cut off a line that a kill left torn.

        Args:
            path: The file.
            refusal: The error where another process has it open.
            read: Reads its content; if this raises, the file is left unchanged.

        Raises:
            StorageError: If it cannot be written.
        """
        self._path = path
        in_use = (
            f"{path} is in use: another process is writing this file. Wait for its end; it can be read now."
        )
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            take_lock(
                path, lambda: lock_descriptor(self._descriptor, blocking=False), lambda: refusal(in_use)
            )
            read()
            with writing(path):
                sync(path.parent)
                complete = sum(len(raw) for _, raw in complete_lines(path, refusal))
                if complete < os.fstat(self._descriptor).st_size:
                    os.ftruncate(self._descriptor, complete)
                    os.fsync(self._descriptor)
        except BaseException:
            self.close()
            raise

    def append(self, line: bytes) -> None:
        """Write a line, its newline included; on return it is on the disk.

        Raises:
            StorageError: If it cannot be written.
        """
        with writing(self._path):
            append_whole(self._descriptor, line)
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Release the lock and the file; it is not to be used any more."""
        os.close(self._descriptor)
