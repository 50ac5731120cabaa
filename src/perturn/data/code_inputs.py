"""Data files that the code of a user's environment names."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from perturn.data.input_digests import files_below
from perturn.io.user_code import parsed

_LONGEST_NAME = 200
"""Number of leading characters of a string literal in which a dot hints at a file name."""


def files_beside(modules: Iterable[Path]) -> list[Path]:
    """Return the existing data files that the code of modules names in string literals.

    A literal may hold the whole name, as in `Path(__file__).with_name("words.txt")`, or a part, as in
    `HERE / "data" / "a.txt"`. Files are searched next to the module and in the current folder. If an expression of
    parts names a folder, all its files are returned.
    """
    found: dict[Path, None] = {}
    for module in modules:
        for text, is_path in _named_paths(parsed(module)):
            for folder in (module.parent, os.getcwd()) if "\0" not in text else ():
                path = Path(os.path.abspath(os.path.join(folder, text)))
                if os.path.isfile(path):
                    found[path] = None
                elif is_path and os.path.isdir(path) and path not in module.parents:
                    found |= dict.fromkeys(files_below(path))
    return [file for file in found if file.suffix not in (".py", ".pyc")]


def _named_paths(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Yield the string literals that may be paths, and whether the code surely uses each as a path."""
    within = set[ast.AST]()
    for node in ast.walk(tree):  # ast.walk yields an expression before its parts
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if "." in node.value[:_LONGEST_NAME]:
                yield node.value, False
                yield node.value.lstrip("/"), False  # after a folder, as in f"{HERE}/words.txt"
        elif node not in within and (parts := _parts(node)):
            within |= set(ast.walk(node))
            yield os.path.join(*parts), True


def _parts(node: ast.AST) -> list[str]:
    """Return the literals that `/`, `joinpath` or `os.path.join` joins; none for any other expression."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        around: list[ast.expr] = [node.left, node.right]
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("join", "joinpath")
    ):
        around = [node.func.value, *node.args]
    else:
        return []
    texts = []
    for each in around:
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            texts.append(each.value)
        else:
            texts += _parts(each)
    return texts
