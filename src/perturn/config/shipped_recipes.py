"""The packaged recipes: the files of `recipes/`, by their names."""

from __future__ import annotations

import re
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "recipes"


def shipped() -> dict[str, Path]:
    """Return the files of the packaged recipes, by the name of the file without its ending."""
    return {file.stem: file for file in sorted(_FOLDER.glob("*.yaml"))}


def shipped_recipe(name: str) -> Path | None:
    """Return the file of a packaged recipe. `name` is the name of the file, or of its run as in `perturn run demo`."""
    return _by_any_name().get(name)


def shipped_names() -> list[str]:
    """Return all names of packaged recipes: names of runs, such as demo, and names of files."""
    return sorted(_by_any_name())


def _by_any_name() -> dict[str, Path]:
    """Return the files of the packaged recipes, by the names of runs and of files."""
    found = shipped()
    for file in list(found.values()):
        run = re.search(r"^name: (\S+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        if run is not None:
            found.setdefault(run[1], file)
    return found


def describe_shipped() -> dict[str, str]:
    """Return the description of each packaged recipe: the comment above its `# Command:` line."""
    return {name: _description(file) for name, file in shipped().items()}


def _description(file: Path) -> str:
    comment, _, _ = file.read_text(encoding="utf-8").partition("# Command:")
    return " ".join(comment.replace("#", " ").split())
