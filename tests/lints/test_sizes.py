"""Sizes that the house rules set: lines of functions and files, modules of packages, and names of modules."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/perturn"
FOLDERS = ("src", "tests", "benchmarks", "docs", "examples")
FILES = sorted(
    file.relative_to(ROOT).as_posix() for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")
)
MOST_LINES, MOST_CODE, MOST_MODULES = 400, 60, 20
LARGER = {"envs", "credit", "methods"}
"""Packages with a module for each entry of a table."""
SHARED = {"environment", "engine", "settings", "protocol", "data"}
"""Names that modules of several packages have."""
MOST_REJECTIONS = 120
"""Places that reject a setting with a text of their own, rather than with a rule of `perturn.errors`."""


def code_lines(function):
    """Lines of a function from its `def` on, without its docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    first = function.body[0]
    return lines - (first.end_lineno - first.lineno + 1)


def long_functions(text):
    """Names of the functions of a text that are over the limit."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    return [each.name for each in found if code_lines(each) > MOST_CODE]


@pytest.mark.parametrize("file", FILES)
def test_a_file_and_its_functions_are_short(file):
    text = (ROOT / file).read_text(encoding="utf-8")

    assert len(text.splitlines()) <= MOST_LINES
    assert long_functions(text) == []


def test_a_long_function_is_found():
    """A docstring counts no line."""
    body = "    x = 1\n" * MOST_CODE
    said = '    """Say."""\n'

    assert long_functions(f"def f():\n{body}") == ["f"]
    assert long_functions(f"def f():\n{said}{body[10:]}") == []


def modules():
    """The modules of the package, without `__init__` and `__main__`."""
    return [file for file in SOURCE.rglob("*.py") if not file.stem.startswith("__")]


def test_a_package_has_few_modules():
    found = Counter(file.parent.relative_to(SOURCE).as_posix() for file in modules())

    assert {name for name, count in found.items() if count > MOST_MODULES} - LARGER == set()


def test_names_of_modules_are_unique():
    found = Counter(file.stem for file in modules())

    assert {name for name, count in found.items() if count > 1} <= SHARED


def test_most_settings_are_rejected_by_a_shared_rule():
    found = [file.read_text(encoding="utf-8").count("ConfigError(") for file in SOURCE.rglob("*.py")]

    assert 0 < sum(found) <= MOST_REJECTIONS
