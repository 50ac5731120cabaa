"""Tests share helpers through `tests/support`, conftest files and modules beside them, never through other tests."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def imports_of_tests(source):
    """Lines that import a test module or a conftest."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(each.name for each in node.names)]
        parts = [part for name in names for part in name.split(".")]
        if any(part == "conftest" or part.startswith("test_") for part in parts):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("file", sorted(TESTS.rglob("*.py")), ids=lambda file: str(file.relative_to(TESTS)))
def test_no_module_of_the_tests_imports_a_test(file):
    """A helper of two modules belongs in tests/support, a fixture of two modules in a conftest.py."""
    assert imports_of_tests(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "from .test_loop import place",
        "from tests.run.test_loop import start",
        "from . import test_loop",
        "import run.test_loop",
        "from ..conftest import make_tiny_model",
        "def test():\n    from conftest import make_tiny_model",
    ],
)
def test_what_the_check_finds(source):
    assert len(imports_of_tests(source)) == 1
