"""A table: entries by name, ours and those that installed packages add through entry points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from perturn.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

T = TypeVar("T")


class Table(Mapping[str, T], Generic[T]):
    """Entries by name, each loaded when it is asked for.

    A package adds one with, in its `pyproject.toml`:

        [project.entry-points."perturn.losses"]
        my-loss = "my_package.my_loss:MyLoss"
    """

    def __init__(self, group: str, own: Mapping[str, T | str]) -> None:
        """Hold our entries.

        Args:
            group: Group of the entry points that add to the table.
            own: Our entries by name, or where they are, as `module:object`, if loading them costs something.
        """
        self._group = group
        self._own = own

    @cached_property
    def _foreign(self) -> dict[str, EntryPoint]:
        """Entries of installed packages."""
        found: dict[str, EntryPoint] = {}
        for point in _entry_points(group=self._group):
            if point.name in self._own or point.name in found:
                raise ConfigError(
                    f"{_package(point)} adds {point.name!r} to {self._group}, where there is one of that name; "
                    "rename it, or uninstall the package."
                )
            found[point.name] = point
        return found

    def __getitem__(self, name: str) -> T:
        point = self._foreign.get(name)  # read even for ours, so that a name that two have is refused
        if point is None:
            entry = self._own[name]
            return cast(T, locate(entry)) if isinstance(entry, str) else entry
        try:
            return cast(T, point.load())
        except Exception as error:
            raise ConfigError(
                f"{name!r} of {_package(point)} cannot be loaded from {point.value!r}: {type(error).__name__}: {error}"
            ) from error

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from self._foreign

    def __len__(self) -> int:
        return len(self._own) + len(self._foreign)

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._foreign


def name_of(entries: Mapping[str, Any], kind: type) -> str:
    """Return the name under which a table has a class.

    Raises:
        ConfigError: If the table has no such class.
    """
    found = next((name for name, entry in entries.items() if entry is kind), None)
    if found is None:
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} is no entry of its table, which has {', '.join(entries)}; add an "
            "entry point to your package (docs: perturn.table.Table)."
        )
    return found


def locate(where: str) -> Any:
    """The object that `module:object` names, loaded when it is asked for.

    So what costs something to load, such as torch, is a line of data where it may not be needed.
    """
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


def require(package: str, who: str, extra: str, otherwise: str = "") -> None:
    """Refuse to go on without an optional library, which an extra of ours brings, naming who needs it.

    Raises:
        ConfigError: If it is missing.
    """
    if find_spec(package) is None:
        raise ConfigError(f'{who} needs {package}; run: pip install "perturn[{extra}]"{otherwise}')


def package_of(group: str, name: str) -> str | None:
    """The installed package that adds an entry to a group, which is not loaded for that; None for ours."""
    found = (point.dist for point in _entry_points(group=group, name=name))
    return next((package.name for package in found if package is not None), None)


def _package(point: EntryPoint) -> str:
    """The package that an entry point came with."""
    return f"package {point.dist.name}" if point.dist else "a package"


def _entry_points(**wanted: str) -> EntryPoints:
    """Return entry points of installed packages; what finds them costs a tenth of the time of `perturn --help`."""
    found: EntryPoints = locate("importlib.metadata:entry_points")(**wanted)
    return found
