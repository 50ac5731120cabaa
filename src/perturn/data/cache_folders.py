"""Cache folders for converted models, reference log-probabilities and indexes, which can be computed again."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from perturn.data.file_seals import file_digest
from perturn.errors import ConfigError
from perturn.io.atomic_write import write_whole

REFERENCE_GIGABYTES = 10.0
"""Default limit of disk space for reference log-probabilities, in GB; a token takes 4 bytes. `PERTURN_REFERENCE_GB`
sets another limit."""

_ABANDONED = 24 * 3600
"""Seconds after which a partial file counts as abandoned."""


def cache_folder() -> Path:
    """Return the user's cache folder; `PERTURN_CACHE` overrides it."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "perturn"
    return Path(os.environ.get("PERTURN_CACHE", default))


def content_digest(file: Path, least: int = 0) -> str:
    """Return the SHA-256 of a file's content. The file is read again only if its size or a time has changed.

    Args:
        file: The file.
        least: Smallest file, in bytes, whose digest is cached. A smaller file is read each time.
    """
    status = file.stat()
    if status.st_size < least:
        return file_digest(file)
    state = f"{file.resolve()}\n{status.st_size}\n{status.st_mtime_ns}\n{status.st_ctime_ns}"
    note = cache_folder() / "digests" / hashlib.sha256(state.encode()).hexdigest()[:32]
    if note.is_file():
        return note.read_text(encoding="utf-8")
    found = file_digest(file)
    write_whole(note, found)
    return found


def reference_bytes() -> int:
    """Return the size limit, in bytes, of a folder of reference log-probabilities.

    Raises:
        ConfigError: If `PERTURN_REFERENCE_GB` is not a number >= 0.
    """
    said = os.environ.get("PERTURN_REFERENCE_GB", "")
    try:
        gigabytes = float(said or REFERENCE_GIGABYTES)
        if not 0 <= gigabytes < float("inf"):
            raise ValueError
    except ValueError:
        raise ConfigError(f"PERTURN_REFERENCE_GB must be a number >= 0, got {said!r}.") from None
    return int(gigabytes * 1e9)


def evict(folder: Path, pattern: str, most: int, keep: Path) -> None:
    """Delete the least recently used files of a folder until the rest fits its size limit.

    Other processes may call this function at the same time.

    Args:
        folder: The folder.
        pattern: Pattern of the files' names.
        most: Size limit, in bytes.
        keep: A file that is never deleted, whatever its size.
    """
    files = sorted(_sizes(folder, pattern), reverse=True)
    left = most - sum(size for _, size, file in files if file == keep)
    for _, size, file in files:
        left -= size if file != keep else 0
        if left < 0 and file != keep:
            _remove(file)


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Delete partial files that are old enough to be abandoned.

    Args:
        folder: The folder.
        pattern: Pattern of the files' names.
    """
    for used, _, file in _sizes(folder, pattern):
        if used < time.time() - _ABANDONED:
            _remove(file)


def _remove(file: Path) -> None:
    with suppress(PermissionError):  # it belongs to another user
        file.unlink(missing_ok=True)


def _sizes(folder: Path, pattern: str) -> Iterator[tuple[float, int, Path]]:
    """Yield the time of last use (Unix seconds), the size in bytes, and the path of each file."""
    for file in folder.glob(pattern):
        with suppress(FileNotFoundError):  # another process deleted it first
            about = file.stat()
            yield about.st_mtime, about.st_size, file
