"""Folders of things that can be made again: converted models, reference log-probabilities, indexes."""

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
"""Disk space for reference log-probabilities unless `PERTURN_REFERENCE_GB` says otherwise; a token takes 4 bytes."""

_ABANDONED = 24 * 3600
"""Seconds after which a file that is still partial has no writer."""


def cache_folder() -> Path:
    """Return the user's cache folder; `PERTURN_CACHE` overrides it."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "perturn"
    return Path(os.environ.get("PERTURN_CACHE", default))


def content_digest(file: Path, least: int = 0) -> str:
    """Return the SHA-256 of a file's content, which is read again only if the file's size or a time has changed.

    Args:
        file: The file.
        least: Bytes from which the digest is kept in the cache; a smaller file is read each time.
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
    """Return the most that a folder of reference log-probabilities may take; `PERTURN_REFERENCE_GB` overrides it.

    Raises:
        ConfigError: If the text is not a size.
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
    """Delete the files that were used longest ago, until the rest fits.

    Other processes may do the same at the same time.

    Args:
        folder: Where they are.
        pattern: Of their names.
        most: Bytes that may stay.
        keep: A folder that stays, however large it is.
    """
    files = sorted(_sizes(folder, pattern), reverse=True)
    left = most - sum(size for _, size, file in files if file == keep)
    for _, size, file in files:
        left -= size if file != keep else 0
        if left < 0 and file != keep:
            _remove(file)


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Delete partial files whose writer must be gone.

    Args:
        folder: Where they are.
        pattern: Of their names.
    """
    for used, _, file in _sizes(folder, pattern):
        if used < time.time() - _ABANDONED:
            _remove(file)


def _remove(file: Path) -> None:
    with suppress(PermissionError):  # another user's, who has a bound too
        file.unlink(missing_ok=True)


def _sizes(folder: Path, pattern: str) -> Iterator[tuple[float, int, Path]]:
    """Yield when each file was used last, its bytes, and the file."""
    for file in folder.glob(pattern):
        with suppress(FileNotFoundError):  # another process was quicker
            about = file.stat()
            yield about.st_mtime, about.st_size, file
