"""Atomic writes: files, folders and appended lines are written completely or not at all. Also locks for writers.

If the system prevents a write, for example by a full disk, the error names the path and the remedy.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from filelock import Timeout

from perturn.errors import PerturnError, StorageError

_REMEDIES = {
    errno.ENOSPC: "free space",
    errno.EDQUOT: "free space, or have your quota raised",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EROFS: "make the file system writable, or choose another place",
    errno.EIO: "see to the disk",
}
"""Remedies for errors of the file system."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Error numbers of file systems without locks."""
_log = logging.getLogger(__name__)
_STRAY = re.compile(r"\..+\.[0-9a-f]{32}\.partial")


def storage_error(path: object, error: Exception) -> StorageError:
    """Return the error that tells the user why a path was not written.

    Args:
        path: The path.
        error: An `OSError`, or a library's exception made from one.
    """
    if isinstance(error, OSError):
        why = error.strerror or str(error)
        remedy = _REMEDIES.get(error.errno or 0, "correct the path or its permissions")
    else:
        why = f"{type(error).__name__}: {error}"
        remedy = "see that there is space and that the place is writable"
    return StorageError(f"{path} cannot be written: {why}; {remedy}, then give the same command again.")


def is_storage_error(error: OSError) -> bool:
    """Return whether an unexpected error comes from the file system."""
    return error.errno in _REMEDIES


@contextmanager
def writing(path: Path, foreign: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Convert errors of the system in a `with` block to a `StorageError` about a path.

    Args:
        path: Path that the block writes, for the message.
        foreign: Exceptions of a library that writes the path, besides `OSError`.

    Raises:
        StorageError: If the path cannot be written.
    """
    kinds: tuple[type[Exception], ...] = (OSError, *foreign)
    try:
        yield
    except PerturnError:
        raise
    except kinds as error:
        raise storage_error(path, error) from error


@contextmanager
def replacing(
    path: str | os.PathLike[str], foreign: tuple[type[Exception], ...] = (), *, once: bool = False
) -> Iterator[Path]:
    """Write or replace a file or a folder, completely or not at all; a file cannot replace a folder.

    If the process is killed, the disk is full or the block raises, the old file is unchanged. After the block, the new
    file is on the disk under its name. An old folder is removed just before the new folder takes its name, so a kill
    between the two leaves neither.

    Args:
        path: The file or folder. Missing parents are created.
        foreign: Exceptions of a library that writes the path, besides `OSError`.
        once: Whether to keep a folder that another process put there in the meantime, since its content is equal.

    Yields: A temporary path in the same folder, to which the block writes.

    Raises:
        StorageError: If the path cannot be written.
    """
    target = Path(path)
    fresh = target.with_name(f".{target.name}.{uuid4().hex}.partial")
    with writing(target, foreign):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield fresh
            sync_whole(fresh)
            if fresh.is_dir() and target.is_dir() and not target.is_symlink() and not once:
                shutil.rmtree(target)  # a folder cannot be put over another
            try:
                fresh.replace(target)
            except OSError:
                if not (once and target.is_dir()):
                    raise
            sync(target.parent)
        finally:
            _remove(fresh)


def write_whole(path: Path, text: str, errors: str = "strict") -> None:
    """Write a text file, completely or not at all; see `replacing`.

    Args:
        path: The file.
        text: Content of the file.
        errors: Treatment of characters that UTF-8 cannot encode, as for `str.encode`.
    """
    data = text.encode("utf-8", errors)
    with replacing(path) as fresh:
        fresh.write_bytes(data)


def link_whole(source: Path, path: Path) -> None:
    """Make a hard link to a finished file; a copy if the file system has no hard links.

    With a hard link, both paths are one file on the disk, so neither may be changed in place.
    """
    with replacing(path) as fresh:
        try:
            os.link(source, fresh)
        except OSError:
            shutil.copy2(source, fresh)


def append_whole(descriptor: int, data: bytes) -> None:
    """Append data to an open file: either all of the data, or none of it and an `OSError`."""
    size = os.fstat(descriptor).st_size
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        with suppress(OSError):  # readers ignore an incomplete last line
            os.ftruncate(descriptor, size)
        raise


def append_line(path: Path, text: str) -> None:
    """Append a line to a file, which is created if missing; see `append_whole`.

    Raises:
        StorageError: If the path cannot be written.
    """
    with writing(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            append_whole(descriptor, text.encode() + b"\n")
        finally:
            os.close(descriptor)


def take_lock(path: Path, acquire: Callable[[], object], in_use: Callable[[], PerturnError]) -> bool:
    """Acquire a lock of filelock. The kernel releases this `flock` when its holder dies, on NFS too.

    Args:
        path: The locked path, for messages.
        acquire: Function that acquires the lock without waiting. If another process holds the lock, it returns False or
            raises `Timeout`.
        in_use: Function that returns the error to raise if another process holds the lock.

    Returns:
        True if the path is locked. On a file system without locks, False after a warning.

    Raises:
        StorageError: If the file cannot be written.
    """
    try:
        taken = acquire() is not False
    except Timeout:
        taken = False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise storage_error(path, error) from error
        _log.warning("%s: no lock (%s); see that nothing else writes there.", path, error)
        return False
    if not taken:
        raise in_use()
    return True


def is_stray(path: Path) -> bool:
    """Return whether a path is an incomplete file or folder that `replacing` left when it was killed."""
    return _STRAY.fullmatch(path.name) is not None


def remove_strays(folder: Path) -> None:
    """Remove the half-written files of killed processes below a folder. No process may be writing there."""
    for path in list(folder.rglob(".*.partial")):
        if is_stray(path):
            _remove(path)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_whole(path: Path) -> None:
    """Flush a file, or a folder with everything in it, to the disk."""
    for each in [path, *path.rglob("*")]:
        sync(each)


def _remove(path: Path) -> None:
    """Remove a half-written file or folder if possible. Errors are ignored, since the first error is reported."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
