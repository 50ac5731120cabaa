"""STYLE sections 2 and 8: docstrings are noun phrases, and identifiers use the words of the field."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "perturn"
BANNED = {"floor", "seat", "house", "room", "shelf", "shelves", "place"}
"""Worker, slot, node and block are the field's words."""
GAMES = {"alfworld", "scienceworld"}
"""Packages in whose worlds there are rooms, shelves and places."""


def docstrings(tree):
    """Texts that stand alone, with their lines: of modules, classes, functions, and below attributes."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                yield child.lineno, str(child.value.value)


def identifiers(tree):
    """Names that are given or used, with their lines."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield getattr(node, "lineno", 0), name


def words(identifier):
    """The words of a name in snake or camel case, in the singular."""
    parts = re.sub(r"([a-z])([A-Z])", r"\1_\2", identifier).lower().split("_")
    return set(parts) | {part.removesuffix("s") for part in parts}


def offences(source, games=False):
    """Lines that break a rule, and how."""
    tree = ast.parse(source)
    found = [f"{line}: {text[:60]!r}" for line, text in docstrings(tree) if text.lstrip().startswith("What")]
    if not games:
        found += [f"{line}: {name}" for line, name in identifiers(tree) if words(name) & BANNED]
    return found


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_speaks_the_words_of_the_field(file):
    assert offences(file.read_text(encoding="utf-8"), games=bool(GAMES & set(file.parts))) == []


@pytest.mark.parametrize(
    "source",
    [
        '"""What a module holds."""',
        'def run():\n    """What it does."""',
        'class Setting:\n    size: int\n    """What it holds."""',
        "class _Floor:\n    pass",
        "world_room = 1",
        "def lose(self, houses):\n    pass",
        "import shelves as kept",
    ],
)
def test_what_the_check_finds(source):
    """Modules, functions and attributes; classes, variables, arguments and imports."""
    assert len(offences(source)) == 1
