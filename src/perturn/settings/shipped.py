"""The recipes that come with the package: the files of `recipes/`, by their names."""

from __future__ import annotations

import re
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "recipes"


def shipped() -> dict[str, Path]:
    """Recipe -> its file, by the name of the file."""
    return {file.stem: file for file in sorted(_FOLDER.glob("*.yaml"))}


def shipped_recipe(name: str) -> Path | None:
    """The file of a recipe, by the name of the file or by that of its run, as in `perturn run demo`."""
    for stem, file in shipped().items():
        if name == stem or re.search(
            rf"^name: {re.escape(name)}$", file.read_text(encoding="utf-8"), re.MULTILINE
        ):
            return file
    return None


def shipped_names() -> list[str]:
    """All names under which a recipe can be given: of its run, such as demo, and of its file."""
    runs = (
        re.search(r"^name: (\S+)$", file.read_text(encoding="utf-8"), re.M) for file in shipped().values()
    )
    return sorted({*shipped(), *(found[1] for found in runs if found)})


def describe_shipped() -> dict[str, str]:
    """Recipe -> the comment that it begins with."""
    return {name: _first_line(file) for name, file in shipped().items()}


def _first_line(file: Path) -> str:
    return file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
