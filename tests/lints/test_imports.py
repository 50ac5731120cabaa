"""Imports of this package by files that no type checker reads: tests, benchmarks, examples, and scripts of the docs."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
FOLDERS = ("benchmarks", "docs", "examples", "studies", "tests")
FILES = sorted(
    file.relative_to(ROOT).as_posix() for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")
)


@cache
def module_file(module: str) -> Path | None:
    """Return the file of a module; None: there is no such module."""
    base = SOURCE.joinpath(*module.split("."))
    return next((file for file in (base / "__init__.py", base.with_suffix(".py")) if file.is_file()), None)


@cache
def names(module: str) -> set[str]:
    """Return the names that a module defines or imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(module_file(module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(name.asname or name.name).split(".")[0] for name in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def broken(text: str) -> list[str]:
    """Return the imports of `perturn` in a text that name no module, or nothing in one."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "perturn":
            wanted = [f"{node.module}.{name.name}" for name in node.names]
            if module_file(node.module) is None:
                found += wanted
                continue
            lazy = "__getattr__" in names(node.module)
            found += [
                each
                for each in wanted
                if not lazy
                and each.rpartition(".")[2] not in names(node.module)
                and module_file(each) is None
            ]
    return found


@pytest.mark.parametrize("file", FILES)
def test_every_import_of_the_package_is_there(file):
    assert broken((ROOT / file).read_text(encoding="utf-8")) == []


def test_a_name_or_a_module_that_is_not_there_is_found():
    text = "from perturn.errors import ConfigError, Nowhere\nfrom perturn.nowhere import One\nfrom perturn import io"

    assert broken(text) == ["perturn.errors.Nowhere", "perturn.nowhere.One"]
