"""Digests of the files outside a run's folder that the run reads, so that a change is found.

The manifest holds size, times of the last change and SHA-256 of each file. A file of equal size and times counts as
unchanged, which costs a look at its status. A file of another time is hashed: equal content is fine, whatever its time.
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
"""For each dotted key of a setting, the input that it named when the run was made, as
`perturn.data.run_files.Input`."""

KEPT_FROM = 1 << 28
"""Bytes of a file from which its digest is kept in the user's cache too, so that other runs need not hash it again."""
_SHOWN = 12
"""Digits of a digest in a message."""


@dataclass(frozen=True)
class Files:
    """The files that a setting names."""

    folder: Path
    """Folder that the names of the files are relative to; absolute."""
    files: Mapping[str, Path]

    def outside(self, folder: Path) -> Files:
        """Return the files that do not lie in a folder."""
        return Files(
            self.folder, {name: file for name, file in self.files.items() if not file.is_relative_to(folder)}
        )


@dataclass(frozen=True)
class Change:
    """An input that has changed since the run was made."""

    setting: str
    given: str
    """The text of the setting."""
    problem: str
    """The change, in words."""
    gone: bool
    """Whether there is no file or folder where the setting points."""
    was: str
    """Where it was."""
    elsewhere: bool
    """Whether the setting is a relative path, which leads to another place from here."""

    def __str__(self) -> str:
        return f"{self.setting}: {self.problem}"


def gather(folder: Path | None, files: Iterable[Path]) -> Files:
    """Return files with their names in a folder; without one in the folder that holds all of them."""
    found = list(files)
    if folder is None:
        folder = Path(os.path.commonpath([file.parent for file in found])) if found else Path()
    return Files(folder, {os.path.relpath(file, folder): file for file in found})


def record(
    given: str, kind: str, found: Files, known: Mapping[str, Any] | None = None, *, thorough: bool = False
) -> dict[str, Any]:
    """Return the manifest's entry of an input.

    Args:
        given: The text of the setting.
        kind: What the text is; see `perturn.bounds.Outside`.
        found: The files that it names.
        known: What the manifest held of it before. A file of the same size and time keeps its digest.
        thorough: Read every file, whatever is known of it.

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
            "changed_ns": status.st_ctime_ns,  # nobody can set it back, as `cp -p` does the other
        }
        if known is not None and known.items() >= state.items():
            return dict(known)
        return {**state, "sha256": file_digest(file) if least is None else content_digest(file, least)}
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}; correct its permissions.") from error


def compare(setting: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Change | None:
    """Return how an input has changed since; None if it has not."""
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
    """Return the files of a recorded input that are still where they were."""
    folder = Path(noted["folder"])
    files = {name: folder / name for name in noted["files"]}
    return Files(folder, {name: file for name, file in files.items() if file.is_file()})


def files_below(folder: Path) -> Iterator[Path]:
    """Yield all files in a folder and below it, links followed; not hidden ones, Python's caches and other runs."""
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
    """Return whether the inputs that a stage reads are equal in two runs, as far as both recorded them."""
    keys = [key for key in ours.keys() & theirs.keys() if is_read(key, reads)]
    return all(_digests(ours[key]) == _digests(theirs[key]) for key in keys)


def _digests(noted: Mapping[str, Any]) -> dict[str, str]:
    return {name: one["sha256"] for name, one in noted["files"].items()}
