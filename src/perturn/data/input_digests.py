"""Digests of a run's input files from outside its folder, so that changes of these files are found.

The manifest holds the size, the times of the last change and the SHA-256 of each file. A file with equal size and times
counts as unchanged and is not read. A file with another time is hashed, and counts as unchanged if its digest is equal.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturn.config.stages import is_read
from perturn.data.cache_folders import content_digest
from perturn.data.file_seals import file_digest
from perturn.data.run_paths import RunPaths
from perturn.errors import RunError

Inputs = dict[str, dict[str, Any]]
"""Recorded inputs, as `perturn.data.run_files.Input`, by the dotted key of the setting that names the input."""

KEPT_FROM = 1 << 28
"""Smallest file, in bytes, whose digest is also kept in the user's cache, so that other runs need not hash the file."""
_SHOWN = 12
"""Number of digits of a digest that a message shows."""


@dataclass(frozen=True)
class Files:
    """The files that a setting names."""

    folder: Path
    """Absolute path of the folder to which the files' names are relative."""
    files: Mapping[str, Path]

    def outside(self, folder: Path) -> Files:
        """Return the files that are not in a folder."""
        return Files(
            self.folder, {name: file for name, file in self.files.items() if not file.is_relative_to(folder)}
        )


@dataclass(frozen=True)
class Change:
    """A change of an input since the run was made."""

    setting: str
    given: str
    """Value of the setting, such as a path."""
    problem: str
    """Description of the change."""
    gone: bool
    """Whether the file or folder that the setting names is missing."""
    was: str
    """Path of the input when the run was made."""
    elsewhere: bool
    """Whether the setting now leads to another folder, since it is a relative path."""

    def __str__(self) -> str:
        return f"{self.setting}: {self.problem}"


def gather(folder: Path | None, files: Iterable[Path]) -> Files:
    """Return a folder, and its files with their relative names; for None, take the folder that contains all files."""
    found = list(files)
    if folder is None:
        folder = Path(os.path.commonpath([file.parent for file in found])) if found else Path()
    return Files(folder, {os.path.relpath(file, folder): file for file in found})


def record(
    given: str, kind: str, found: Files, known: Mapping[str, Any] | None = None, *, thorough: bool = False
) -> dict[str, Any]:
    """Return the manifest's entry of an input.

    Args:
        given: Value of the setting, such as a path.
        kind: Kind of the setting; see `perturn.bounds.Outside`.
        found: Files that the setting names.
        known: The manifest's entry so far. A file with the same size and times keeps its recorded digest.
        thorough: Whether to read every file, even if its size and times are unchanged.

    Raises:
        RunError: If a file cannot be read.
    """
    is_same = known is not None and known["folder"] == str(found.folder) and not thorough
    held = known["files"] if known is not None and is_same else {}
    least = None if thorough else KEPT_FROM
    files = {name: _state(file, held.get(name), least) for name, file in sorted(found.files.items())}
    return {"given": given, "kind": kind, "folder": str(found.folder), "files": files}


def _state(file: Path, known: Mapping[str, Any] | None, least: int | None) -> dict[str, Any]:
    try:
        status = file.stat()
        state = {
            "bytes": status.st_size,
            "modified_ns": status.st_mtime_ns,
            "changed_ns": status.st_ctime_ns,  # `cp -p` can set the modification time, but not this time
        }
        if known is not None and known.items() >= state.items():
            return dict(known)
        return {**state, "sha256": file_digest(file) if least is None else content_digest(file, least)}
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}; correct its permissions.") from error


def compare(setting: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Change | None:
    """Return the change of an input between two entries of a manifest; None if it has not changed."""
    then, files = before["files"], now["files"]
    given, folder = before["given"], Path(before["folder"])
    was = str(folder / next(iter(then))) if len(then) == 1 else str(folder)
    elsewhere = now["folder"] != before["folder"]
    if then and not files:
        problem = f"{given or was} is gone since this run was made"
        return Change(setting, given, problem, True, was, elsewhere)
    found = [
        *(f"{name} is gone since this run was made" for name in then if name not in files),
        *(f"{name} is new since this run was made" for name in files if name not in then),
        *(
            f"{name} changed since this run was made (sha256 {then[name]['sha256'][:_SHOWN]}… → "
            f"{files[name]['sha256'][:_SHOWN]}…)"
            for name in then
            if name in files and files[name]["sha256"] != then[name]["sha256"]
        ),
    ]
    if not found:
        return None
    more = f", and {len(found) - 1} more of its files" if len(found) > 1 else ""
    return Change(setting, given, f"{found[0]}{more}", False, was, elsewhere)


def recorded_files(noted: Mapping[str, Any]) -> Files:
    """Return the files of a recorded input that still exist at their recorded paths."""
    folder = Path(noted["folder"])
    files = {name: folder / name for name in noted["files"]}
    return Files(folder, {name: file for name, file in files.items() if file.is_file()})


def files_below(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder, following links, without hidden files, Python's caches and other runs."""
    seen, waiting = set[str](), [folder]
    while waiting:
        here = waiting.pop()
        if (real := os.path.realpath(here)) in seen:
            continue
        seen.add(real)
        for each in sorted(here.iterdir()):
            if each.name.startswith(".") or each.name == "__pycache__":
                continue
            if each.is_dir() and not RunPaths(each).is_run:
                waiting.append(each)
            elif each.is_file():
                yield each


def same_inputs(ours: Inputs, theirs: Inputs, reads: Iterable[str]) -> bool:
    """Return whether two runs have equal inputs for a stage. Inputs that only one run recorded do not count."""
    keys = [key for key in ours.keys() & theirs.keys() if is_read(key, reads)]
    return all(_digests(ours[key]) == _digests(theirs[key]) for key in keys)


def _digests(noted: Mapping[str, Any]) -> dict[str, str]:
    return {name: one["sha256"] for name, one in noted["files"].items()}
