"""Files and folders that are written whole or not at all, lines that are appended whole, and one writer at a time.

Whatever keeps them from being written, such as a full disk, is one error that names the path and the remedy.
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
    """Return reason why a path was not written, for the user's eyes.

    Args:
        path: What was written.
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
    """Return whether an unexpected error is the file system's."""
    return error.errno in _REMEDIES


@contextmanager
def writing(path: Path, foreign: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Write a path in the block.

    Args:
        path: What is written, for the message.
        foreign: Exceptions of a library that writes for us, besides `OSError`.

    Raises:
        StorageError: If it cannot be written.
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

    A kill, a full disk or an exception leave the old file unchanged. When the block has ended well, the new file is on
    the disk under its name.

    Args:
        path: The file or folder; its parents are made.
        foreign: Exceptions of a library that writes for us, besides `OSError`.
        once: Whether a folder that another process put there meanwhile stays, since it holds the same.

    Yields: A temporary name in the same folder to write to.

    Raises:
        StorageError: If it cannot be written.
    """
    target = Path(path)
    fresh = target.with_name(f".{target.name}.{uuid4().hex}.partial")
    with writing(target, foreign):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield fresh
            for each in [fresh, *fresh.rglob("*")]:
                sync(each)
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
    """Write a text file whole or not at all; see `replacing`.

    Args:
        path: The file.
        text: Its content.
        errors: What to do about characters that UTF-8 cannot hold, as for `str.encode`.
    """
    data = text.encode("utf-8", errors)
    with replacing(path) as fresh:
        fresh.write_bytes(data)


def link_whole(source: Path, path: Path) -> None:
    """Have a finished file under a second path too, whole or not at all; as a copy where a disk has no such links.

    The two are one file on the disk, so neither may be changed in place, only replaced.
    """
    with replacing(path) as fresh:
        try:
            os.link(source, fresh)
        except OSError:
            shutil.copy2(source, fresh)


def append_whole(descriptor: int, data: bytes) -> None:
    """Write at the end of a file that is open for appending: all of the data, or an `OSError` and none of it."""
    size = os.fstat(descriptor).st_size
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        with suppress(OSError):  # what is left is a line cut short, which readers know
            os.ftruncate(descriptor, size)
        raise


def append_line(path: Path, text: str) -> None:
    """Write a line at the end of a file, making it if there is none; see `append_whole`.

    Raises:
        StorageError: If it cannot be written.
    """
    with writing(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            append_whole(descriptor, text.encode() + b"\n")
        finally:
            os.close(descriptor)


def take_lock(path: Path, acquire: Callable[[], object], in_use: Callable[[], PerturnError]) -> bool:
    """Take a lock of filelock's, an `flock` that the kernel releases when its holder dies, on NFS too.

    Args:
        path: What is locked.
        acquire: Takes it at once, or says that another process has it: by False or a `Timeout`.
        in_use: The error where it has.

    Returns:
        Whether it is locked; on a file system without locks it is not, which is warned of.

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
    """Return whether `replacing` was writing a file or folder when it was killed."""
    return _STRAY.fullmatch(path.name) is not None


def remove_strays(folder: Path) -> None:
    """Remove half-written files of a killed process in a folder and its subfolders; no process may be writing there."""
    for path in list(folder.rglob(".*.partial")):
        if is_stray(path):
            _remove(path)


def sync(path: Path) -> None:
    """Have a file, or the entries of a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove a half-written file or folder if possible; the error that stopped the writing is reported."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
