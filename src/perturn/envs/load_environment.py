"""Make environments from the section `environment` of a recipe, and find the files of a user's environment code."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import reprlib
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from perturn.config.parsing import build
from perturn.config.sections import Section
from perturn.data.input_digests import files_below
from perturn.envs import ENVIRONMENTS
from perturn.envs.async_worlds import awaited
from perturn.envs.user_environment import at_border, attribute
from perturn.errors import ConfigError, EnvironmentFailure, PerturnError, check_type, did_you_mean
from perturn.faults import close_world
from perturn.io.plain_data import fault, told
from perturn.table import package_of
from perturn.types import Environment

_PERTURN = Path(__file__).parents[1]
_LONGEST_NAME = 200
"""Number of leading characters of a string literal in which a dot hints at a file name."""


def load_object(name: str) -> Any:
    """Import `module:attribute` or `file.py:attribute` and return the attribute.

    Modules in the current folder are found too. A file is loaded by its path. So two files may have the same name, and
    a file may have the name of an installed package.

    Raises:
        ConfigError: If the module or the attribute does not exist, or the import fails.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(f"{name!r} names no class; write it as {module}:CLASS.{_classes_of(module)}")
    try:
        found = _module_of_file(module) if module.endswith(".py") else _module_of_name(module)
        if not hasattr(found, attribute):
            raise AttributeError(f"the module has no {attribute!r}")
        return getattr(found, attribute)
    except Exception as error:  # a module is user code and may raise anything
        known = _classes_of(module, attribute) if isinstance(error, AttributeError) else ""
        where = _at(error, module)
        remedy = (
            "correct this line"
            if where or isinstance(error, SyntaxError)
            else "write it as module:Class or file.py:Class"
        )
        raise ConfigError(
            f"{name!r} cannot be loaded: {type(error).__name__}: {error}{where}; {remedy}.{known}"
        ) from error


def _module_of_name(module: str) -> ModuleType:
    """Import a module by its dotted name, also from the current folder."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    return importlib.import_module(module)


def _module_of_file(file: str) -> ModuleType:
    """Import a module from a file, and search the file's folder for the module's own imports."""
    path = Path(os.path.abspath(file))
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {file} in {os.getcwd()}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    for name in (path.stem, f"{path.stem}@{path.parent}"):
        loaded = sys.modules.get(name)
        if loaded is None:
            break
        if (own := getattr(loaded, "__file__", None)) and os.path.exists(own) and path.samefile(own):
            return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(made)
    except BaseException:
        del sys.modules[name]
        raise
    return made


def _classes_of(module: str, wanted: str = "") -> str:
    """Return a hint that names the classes of a local module, without running it; empty if it has no class."""
    _, files = module_files(f"{module}:")
    body = _parsed(files[0]).body if files else []
    names = [each.name for each in body if isinstance(each, ast.ClassDef) and not each.name.startswith("_")]
    return did_you_mean(wanted, names) if names else ""


def _at(error: Exception, module: str) -> str:
    """Return the file and line of a local module where its import failed; empty if the error arose elsewhere."""
    file = os.path.abspath(module)
    lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == file]
    return f" (at {module}:{lines[-1]})" if lines else ""


def module_files(name: str) -> tuple[Path, list[Path]]:
    """Return the source files of `module:object` or `file.py:object`, without running them.

    The result has the module's own file and the local modules that it imports, directly or not. Files of installed
    packages are left out, since a run records the versions of packages.

    Args:
        name: Name in the form that `load_object` takes.

    Returns:
        The folder from which local modules are imported, and the files; no file if the module is not found.
    """
    module = name.partition(":")[0]
    if module.endswith(".py"):
        first = Path(os.path.abspath(module))
        root = first.parent
    else:
        first = _source_of(module)
        root = first.parents[module.count(".") + (first.name == "__init__.py")]
    if not first.is_file() or _is_installed(first):
        return root, []
    found: dict[Path, None] = {}
    waiting = [first]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found[file] = None
            waiting += _imported(file, root)
    return root, list(found)


def files_beside(modules: Iterable[Path]) -> list[Path]:
    """Return the existing data files that the code of modules names in string literals.

    A literal may hold the whole name, as in `Path(__file__).with_name("words.txt")`, or a part, as in
    `HERE / "data" / "a.txt"`. Files are searched next to the module and in the current folder. If an expression of
    parts names a folder, all its files are returned.
    """
    found: dict[Path, None] = {}
    for module in modules:
        for text, is_path in _named_paths(_parsed(module)):
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


def _source_of(module: str) -> Path:
    """Return the file of a module, found as `load_object` finds it; if there is none, a path that does not exist."""
    folders: list[str] | None = [os.getcwd(), *sys.path]
    missing = Path(os.path.abspath(module.replace(".", os.sep) + ".py"))
    parts = module.split(".")
    for number in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: number + 1]), folders)
        if (
            spec is None and number == 0 and parts[0] not in sys.modules
        ):  # an editable installation has its own finder
            spec = importlib.util.find_spec(parts[0])
        if spec is None:
            return missing
        if number == len(parts) - 1:
            return Path(os.path.abspath(spec.origin)) if spec.has_location and spec.origin else missing
        folders = list(spec.submodule_search_locations or [])
    return missing


def _is_installed(file: Path) -> bool:
    """Return whether a file belongs to an installed package, to Python or to Perturn."""
    own = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    folders = [*own, *site.getsitepackages(), site.getusersitepackages(), str(_PERTURN)]
    return any(file.is_relative_to(folder) for folder in folders)


def _parsed(file: Path) -> ast.Module:
    """Return the syntax tree of a file; an empty tree for invalid Python, which importing the file reports."""
    try:
        return ast.parse(file.read_bytes())
    except (ValueError, SyntaxError):
        return ast.Module([], [])


def _imported(file: Path, root: Path) -> Iterator[Path]:
    """Yield the files of the local modules that a file imports."""
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.Import):
            for each in node.names:
                yield from _modules(root, each.name)
        elif isinstance(node, ast.ImportFrom):
            folder = file.parents[node.level - 1] if node.level else root
            for each in node.names:
                yield from _modules(folder, ".".join(filter(None, (node.module, each.name))))


def _modules(folder: Path, name: str) -> Iterator[Path]:
    """Yield the files of a dotted module name below a folder: the `__init__.py` of its packages, and the module."""
    for part in name.split("."):
        for file in (folder / f"{part}.py", folder / part / "__init__.py"):
            if file.is_file() and not _is_installed(file):
                yield file
        folder = folder / part


def environment_maker(section: Section) -> Callable[[], Environment]:
    """Return a function that makes an environment from the section `environment` of a recipe.

    The key `name` is an entry of ENVIRONMENTS, or `module:Class`.

    Raises:
        ConfigError: If the environment is unknown or a setting is wrong.
    """
    close_world(make_environment(section))  # a wrong setting raises here, before the run begins
    return partial(make_environment, section)


def make_environment(section: Section) -> Environment:
    """Make one environment object from the section `environment` of a recipe."""
    name = str(section["name"])
    own = ":" in name or (name not in ENVIRONMENTS and name.endswith(".py"))
    table: Mapping[str, Any] = {name: load_object(name)} if own else ENVIRONMENTS
    if own:
        check_type(repr(name), table[name], Callable, "a class, or a function that makes the world")
    try:
        world = awaited(build(table, section, "environment", guarded=False))
        if own or package_of("perturn.environments", name) is not None:
            world = at_border(world, name.rpartition(":")[2])
        world_name: object = attribute(world, "name")
    except (PerturnError, KeyboardInterrupt):
        raise
    except BaseException as error:  # an environment is user code and may raise anything
        raise EnvironmentFailure(
            f"environment {name!r} cannot start: {type(error).__name__}: {told(error)}"
        ) from error
    if not isinstance(world_name, str) or not world_name or fault(world_name, "name"):
        raise EnvironmentFailure(
            f"the environment's name must be a text such as 'game-1.0', got {reprlib.repr(world_name)}."
        )
    return world
