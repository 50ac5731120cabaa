"""An append-only file of lines, written by one process at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from filelock import lock_descriptor

from perturn.io.atomic_write import append_whole, sync, take_lock, writing
from perturn.io.read_input import Refusal, complete_lines


class GrowingFile:
    """File that is open for appending and locked until `close` or the end of the process. Readers need no lock."""

    def __init__(self, path: Path, refusal: Refusal, read: Callable[[], object]) -> None:
        """Open the file and remove an incomplete last line. A missing file or folder is created.

        Args:
            path: The file.
            refusal: Error to raise if another process has the file open.
            read: Function that reads the content. If it raises, the file is left unchanged.

        Raises:
            StorageError: If the file cannot be written.
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
        """Write a line, which includes its newline. When the method returns, the line is on the disk.

        Raises:
            StorageError: If the file cannot be written.
        """
        with writing(self._path):
            append_whole(self._descriptor, line)
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file and release its lock. The object cannot be used afterwards."""
        os.close(self._descriptor)
