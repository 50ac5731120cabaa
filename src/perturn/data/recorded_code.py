"""Find the files of the user's code that a run has recorded."""

from __future__ import annotations

from pathlib import Path

from perturn.data.file_seals import read_manifest


def code_files(folder: Path) -> dict[str, Path]:
    """Return the recorded file of each `file.py:Class` of a run, which may have been begun in another folder."""
    inputs = read_manifest(folder).get("inputs", {})
    return {
        str(one["given"]): Path(one["folder"], Path(str(one["given"]).rpartition(":")[0]).name)
        for one in inputs.values()
        if one.get("kind") == "code" and one.get("folder")
    }
