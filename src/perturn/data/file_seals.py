"""State of a run folder's files when they were finished, so that damage is seen and never read as a result.

The manifest seals each file with its size, the time of its last change and its SHA-256. A file of the recorded size and
time counts as whole, which costs no reading; a file with another time, as in a copied folder, is hashed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturn.data.run_files import Manifest, read_note
from perturn.data.run_paths import RunPaths
from perturn.errors import RunError

Seals = dict[str, dict[str, Any]]
"""File, as a path in the run folder, to its seal."""


@dataclass(frozen=True)
class Damage:
    """A file that has changed since it was written."""

    file: str
    """Its path in the run folder."""
    stage: str | None
    """Which stage made it; None: several share it."""
    problem: str
    """The fault, in a few words."""


def file_digest(path: Path) -> str:
    """Return SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(folder: Path, made: Iterable[Path], stage: str | None) -> Seals:
    """Seal the files that a stage has finished.

    Args:
        folder: Of the run.
        made: Files and folders in it; those that are not there are left out.
        stage: Which stage made them; None: several share them.
    """
    files = [file for path in made for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    return {str(file.relative_to(folder)): _seal(file, stage) for file in files if file.is_file()}


def _seal(file: Path, stage: str | None) -> dict[str, Any]:
    status = file.stat()
    return {
        "stage": stage,
        "bytes": status.st_size,
        "modified_ns": status.st_mtime_ns,
        "sha256": file_digest(file),
    }


def find_damage(folder: Path, seals: Mapping[str, Mapping[str, Any]], thorough: bool = False) -> list[Damage]:
    """Return the files that have changed since they were sealed.

    Args:
        folder: Of the run.
        seals: What they were.
        thorough: Hash every file, whatever its time.
    """
    problems = {file: _problem(folder / file, one, thorough) for file, one in seals.items()}
    return [Damage(file, seals[file]["stage"], problem) for file, problem in problems.items() if problem]


def _problem(file: Path, one: Mapping[str, Any], thorough: bool) -> str | None:
    try:
        status = file.stat()
        if status.st_size != one["bytes"]:
            return f"has {status.st_size} bytes, and was written with {one['bytes']}"
        if not thorough and status.st_mtime_ns == one["modified_ns"]:
            return None
        return None if file_digest(file) == one["sha256"] else "has other content than was written"
    except FileNotFoundError:
        return "is gone"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def without_removed(folder: Path, seals: Seals) -> tuple[Seals, set[str]]:
    """Forget what a user has removed: a stage with all its files, so that it runs again, or a shared file.

    Returns:
        The seals that are left, and the stages that are gone.
    """
    there = {one["stage"] or file for file, one in seals.items() if os.path.lexists(folder / file)}
    left = {file: one for file, one in seals.items() if (one["stage"] or file) in there}
    return left, {one["stage"] for file, one in seals.items() if file not in left and one["stage"]}


def refuse_damage(folder: Path, seals: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse to resume from, or to report on, files that have changed since they were written."""
    damaged = find_damage(folder, seals)
    if damaged:
        others = f", and {len(damaged) - 1} more files are damaged" if len(damaged) > 1 else ""
        raise RunError(
            f"{folder / damaged[0].file} {damaged[0].problem}{others}. Restore from a copy; or `perturn verify "
            f"{folder}` names what to remove to have it made again."
        )


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a run folder; None if there is none.

    Raises:
        RunError: If the file is not a manifest.
    """
    file = RunPaths(folder).manifest
    manifest = read_note(file, Manifest)
    if manifest is not None and "stages" not in manifest:
        raise RunError(f"{file} is no manifest: it has no stages; restore it or remove the run folder.")
    return manifest and {
        **manifest,
        "stages": {name: _known(note) for name, note in manifest["stages"].items()},
    }


def _known(note: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a stage in a manifest of whichever version; counts are always there."""
    return {"counts": {}} | {key: value for key, value in note.items() if value is not None}


def own_digest(manifest: Mapping[str, Any]) -> str:
    """Return SHA-256 of a manifest without its own `sha256`, which is this."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
