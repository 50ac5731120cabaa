"""The recipes that come with the package: the files of `recipes/`, by their names."""

from __future__ import annotations

import re
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "recipes"


def shipped() -> dict[str, Path]:
    """Turn recipe into its file, by the name of the file."""
    return {file.stem: file for file in sorted(_FOLDER.glob("*.yaml"))}


def shipped_recipe(name: str) -> Path | None:
    """Return the file of a recipe, by the name of the file or of its run, as in `perturn run demo`."""
    return _by_any_name().get(name)


def shipped_names() -> list[str]:
    """Return all names under which a recipe can be given: of its run, such as demo, and of its file."""
    return sorted(_by_any_name())


def _by_any_name() -> dict[str, Path]:
    """Name of a recipe's run or of its file -> the file."""
    found = shipped()
    for file in list(found.values()):
        run = re.search(r"^name: (\S+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        if run is not None:
            found.setdefault(run[1], file)
    return found


def describe_shipped() -> dict[str, str]:
    """Turn recipe into the comment that it begins with."""
    return {name: _first_line(file) for name, file in shipped().items()}


def _first_line(file: Path) -> str:
    return file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
