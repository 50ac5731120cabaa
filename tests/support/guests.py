"""Third-party packages, laid out as if they were installed."""

import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace

import pytest

import perturn.table
from perturn.envs.abilities import ABILITIES
from perturn.table import Table
from perturn.table_index import TABLES, table

GUEST = Path(__file__).parents[1] / "guest"
"""A distribution with an entry for each table."""


def guest_entries() -> dict[str, dict[str, str]]:
    """Return the entry points of `GUEST` by group."""
    found: dict[str, dict[str, str]] = tomllib.loads((GUEST / "pyproject.toml").read_text())["project"][
        "entry-points"
    ]
    return found


def install_guest(site: Path) -> None:
    """Install `GUEST` into a folder."""
    shutil.copytree(GUEST / "src", site, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    describe(site, "perturn-guest", "1.5", guest_entries())


def describe(site: Path, name: str, version: str, entries: Mapping[str, Mapping[str, str]]) -> None:
    """Write the metadata of an installed distribution."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {where}\n" for name, where in points.items())
        for group, points in entries.items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups))


@contextmanager
def visible(site: Path) -> Iterator[None]:
    """Make the packages of a folder importable. All tables read their entry points at the beginning and at the end."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(site)
        read_again()
        yield
    read_again()
    for name in [name for name in sys.modules if name.partition(".")[0] == "perturn_guest"]:
        del sys.modules[name]


@contextmanager
def added(group: str, **kinds: type) -> Iterator[None]:
    """Add classes to a table, in addition to the entries of installed packages."""
    real, module = perturn.table._entry_points, "guest_of_a_test"
    points = EntryPoints(EntryPoint(name, f"{module}:{name}", group) for name in kinds)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, module, SimpleNamespace(**kinds))
        patched.setattr(
            perturn.table,
            "_entry_points",
            lambda **wanted: EntryPoints([*real(**wanted), *points.select(**wanted)]),
        )
        read_again()
        yield
    read_again()


def read_again() -> None:
    """Make all tables read their entry points again."""
    for each in (*map(table, TABLES), ABILITIES):
        if isinstance(each, Table):
            vars(each).pop("_foreign", None)
