"""Seals of a run folder's finished files, so that damage is found before a file is read as a result.

A seal in the manifest holds a file's size, the time of its last change and its SHA-256. A file with the recorded size
and time counts as unchanged and is not read. A file with another time, for example in a copied folder, is hashed.
The large files of an optimizer, which the next iteration deletes, are sealed without SHA-256: only their size counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from perturn.data.run_files import Manifest, read_note
from perturn.data.run_paths import OPTIMIZER, RunPaths, checkpoint_of
from perturn.errors import RunError
from perturn.io.atomic_write import sync, writing

Seals = dict[str, dict[str, Any]]
"""Seals of files, by the path in the run folder."""


@dataclass(frozen=True)
class Damage:
    """A file that has changed since it was sealed."""

    file: str
    """Path of the file in the run folder."""
    stage: str | None
    """Name of the stage that made the file. None: several stages share the file."""
    problem: str
    """Description of the change."""


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(folder: Path, made: Iterable[Path], stage: str | None, known: Seals | None = None) -> Seals:
    """Return seals of the files that a stage has finished.

    Args:
        folder: Folder of the run.
        made: Files and folders in the run folder. Missing files are left out.
        stage: Name of the stage that made the files. None: several stages share them.
        known: Earlier seals of the files, which are kept if size and time are unchanged.
    """
    files = [file for path in made for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    names = {str(file.relative_to(folder)): file for file in files if file.is_file()}
    return {name: _seal(file, stage, (known or {}).get(name)) for name, file in names.items()}


def _seal(file: Path, stage: str | None, known: dict[str, Any] | None) -> dict[str, Any]:
    status = file.stat()
    now = {"stage": stage, "bytes": status.st_size, "modified_ns": status.st_mtime_ns}
    if known is not None and known == {**known, **now}:
        return known
    with writing(file):
        sync(file)  # else a power failure could leave a sealed file that is not whole
    status = file.stat()  # a network file system may set the time only now
    now |= {"bytes": status.st_size, "modified_ns": status.st_mtime_ns}
    return {**now, "sha256": None if file.name in OPTIMIZER else file_digest(file)}


def find_damage(folder: Path, seals: Mapping[str, Mapping[str, Any]], thorough: bool = False) -> list[Damage]:
    """Return the files that have changed since they were sealed.

    Args:
        folder: Folder of the run.
        seals: Seals of the files, by path.
        thorough: Whether to hash every file, whatever its time.
    """
    problems = {file: _problem(folder, Path(file), one, thorough) for file, one in seals.items()}
    return [Damage(file, seals[file]["stage"], problem) for file, problem in problems.items() if problem]


def _problem(folder: Path, name: Path, one: Mapping[str, Any], thorough: bool) -> str | None:
    """Return the damage of a file; None if it is undamaged. A foreign manifest may name any path."""
    if name.is_absolute() or ".." in name.parts:
        return "is not in the run folder"
    file = folder / name
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            return "is no file"
        if status.st_size != one["bytes"]:
            return f"has {status.st_size} bytes, and was written with {one['bytes']}"
        if one["sha256"] is None or (not thorough and status.st_mtime_ns == one["modified_ns"]):
            return None
        return None if file_digest(file) == one["sha256"] else "has other content than was written"
    except FileNotFoundError:
        return "is gone"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except ValueError:
        return "has a name that no file can have"


def without_removed(folder: Path, seals: Seals) -> tuple[Seals, set[str]]:
    """Drop the seals of removed files. A stage counts as removed if all its files are gone, and then runs again.

    Returns:
        The remaining seals, and the names of the removed stages.
    """
    there = {one["stage"] or file for file, one in seals.items() if os.path.lexists(folder / file)}
    left = {file: one for file, one in seals.items() if (one["stage"] or file) in there}
    return left, {one["stage"] for file, one in seals.items() if file not in left and one["stage"]}


def refuse_damage(folder: Path, seals: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise a RunError if sealed files have changed, so that no command resumes from or reports on them."""
    damaged = find_damage(folder, seals)
    if damaged:
        others = f", and {len(damaged) - 1} more files are damaged" if len(damaged) > 1 else ""
        raise RunError(
            f"{folder / damaged[0].file} {damaged[0].problem}{others}. Restore from a copy; or `perturn verify "
            f"{quote(str(folder))}` names what to remove to have it made again."
        )


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a run folder, with the keys `stages` and `files`. Both are empty if it has no manifest.

    Raises:
        RunError: If the file is not a manifest.
    """
    file = RunPaths(folder).manifest
    manifest = read_note(file, Manifest)
    if manifest is None:
        return {"stages": {}, "files": {}}
    if "stages" not in manifest:
        raise RunError(f"{file} is no manifest: it has no stages; restore it or remove the run folder.")
    stages = {name: _known(note) for name, note in manifest["stages"].items()}
    return {"files": {}, **manifest, "stages": stages}


def done_stages(manifest: Mapping[str, Any]) -> set[str]:
    """Return the names of the stages that are done, from a manifest."""
    return {name for name, note in manifest["stages"].items() if note.get("done")}


def sealed_digests(manifest: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Return SHA-256 digests of sealed files, by their path in the run.

    Args:
        manifest: Manifest of the run.
        names: Paths in the run of files, and of checkpoints, which stand for all their files.
    """
    seals = {file: one for file, one in manifest["files"].items() if one["sha256"] is not None}
    return {
        file: one["sha256"] for file, one in seals.items() if file in names or checkpoint_of(file) in names
    }


def digests_of_stages(seals: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Return short digests of all files of stages, without optimizers, which a run may delete."""
    files = [file for file in seals if seals[file]["stage"] in names and Path(file).name not in OPTIMIZER]
    return {file: seals[file]["sha256"][:16] for file in files}


def _known(note: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a stage from a manifest of any version, with empty counts if they are missing."""
    return {"counts": {}} | {key: value for key, value in note.items() if value is not None}


def own_digest(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its key `sha256`, which holds this digest."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
