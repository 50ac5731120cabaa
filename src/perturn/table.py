"""A table: entries by name, of the core and those that packages add through entry points, as `perturn.methods` is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from perturn.errors import ConfigError, check_free, closest
from perturn.io.plain_data import told

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

T = TypeVar("T")

_ALIKE = 0.85
"""Least likeness of a misspelt name, from 0 to 1: `expert` and `experts` have 0.92, `expert` and `export` 0.83."""

_DECLARED = ("needs", "traits")
"""Declarations of an entry, which it may take over from a base class."""


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
        self.group = group
        self._own = own

    @cached_property
    def _foreign(self) -> dict[str, EntryPoint]:
        """Entries of `perturn.methods`, and of other installed packages."""
        found: dict[str, EntryPoint] = {}
        for point in sorted(
            _entry_points(group=self.group), key=_is_ours, reverse=True
        ):  # of two, another is to blame
            says = f"{_package(point)} adds to {self.group} the name"
            check_free(point.name, [*self._own, *found], says, "Rename it, or uninstall the package.")
            found[point.name] = point
        return found

    def __getitem__(self, name: str) -> T:
        point = self._foreign.get(name)  # read even for ours, so that a name that two have is refused
        if point is None:
            entry = self._own[name]
            return cast(T, locate(entry)) if isinstance(entry, str) else entry
        try:
            return cast(T, point.load())
        except Exception:
            # The package's name is read from a file, which takes longer than to load an entry again.
            with guarded(f"{name!r} of {_package(point)} cannot be loaded from {point.value!r}"):
                raise

    def target(self, name: str) -> str:
        """Return where an entry is, as `module:object`; empty if it is an object already."""
        point = self._foreign.get(name)
        entry = self._own[name] if point is None else point.value
        return entry if isinstance(entry, str) else ""

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from self._foreign

    def __len__(self) -> int:
        return len(self._own) + len(self._foreign)

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._foreign


def name_of(entries: Mapping[str, Any], kind: type) -> str:
    """Return the name under which a table has a class.

    The entry that lies where the class does is loaded first, and usually no other one is.

    Raises:
        ConfigError: If the table has no such class.
    """
    names, first = list(entries), ("", f"{kind.__module__}:{kind.__qualname__}")
    if isinstance(entries, Table):
        names.sort(key=lambda name: entries.target(name) not in first)
    found = next((name for name in names if entries[name] is kind), None)
    if found is None:
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} is not in its table, which has {', '.join(entries)}; add an "
            "entry point to your package (docs: perturn.table.Table)."
        )
    return found


def locate(where: str) -> Any:
    """Return the object that `module:object` names, loaded when it is asked for.

    So an entry that is slow to load, such as one with torch, is a line of data until it is needed.
    """
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


def check_names(entry: type, *, kind: str, known: Collection[str], traits: type | None = None) -> None:
    """Reject a class with a public attribute that is never read, since its name is misspelt or belongs in `traits`.

    Settings, the class's own dataclass fields, may have any name. A name counts as misspelt only if the class lacks the
    name that was meant, so that `steps` next to `step` is allowed. `need` and `trait` are also misspelt if only a base
    class has `needs` and `traits`, since the class then keeps the declarations of the base class.

    Args:
        entry: The class of the entry.
        kind: What the entry is, for the message, such as `credit`.
        known: Names that an attribute may have: the members of the table's protocol.
        traits: Dataclass of the traits, which are set in `traits` and not as attributes.

    Raises:
        ConfigError: If there is such an attribute.
    """
    settings = {each.name for each in fields(entry)} if is_dataclass(entry) else set[str]()
    public = {name for each in entry.__mro__[:-1] for name in vars(each) if not name.startswith("_")}
    told = {each.name: f"{traits.__name__}({each.name}=...)" for each in fields(traits)} if traits else {}
    meant = told | {name: name for name in known}
    for name in sorted(public - settings - set(known)):
        found = closest(name, meant.keys() - (public - told.keys() - _inherited(entry, name)), _ALIKE)
        if found is not None:
            raise ConfigError(
                f"{kind} {entry.__name__} has {name!r}, which is never read. Did you mean `{meant[found]}`?"
            )


def _inherited(entry: type, name: str) -> set[str]:
    """Return declarations that no class has down from the class which has a name, but a base class of that one has."""
    owner = next(index for index, each in enumerate(entry.__mro__) if name in vars(each))
    return {each for each in _DECLARED if not any(each in vars(one) for one in entry.__mro__[: owner + 1])}


def check_members(entry: object, members: Iterable[str], kind: str, protocol: str) -> None:
    """Reject an entry that lacks a member of its protocol.

    Args:
        entry: The entry, made with its settings.
        members: Names of the members.
        kind: What the entry is, such as `loss`.
        protocol: Where the protocol is defined.

    Raises:
        ConfigError: Such as `loss Mine must have 'rewards', and has none; see perturn.losses.Loss.`
    """
    for member in members:
        if member not in dir(entry):
            raise ConfigError(
                f"{kind} {type(entry).__name__} must have {member!r}, and has none; see {protocol}."
            )


def at_defaults(entry: Callable[..., T]) -> T | None:
    """Return an entry with its default settings; None where a setting has no default.

    Raises:
        ConfigError: If the class raises.
    """
    settings = signature(entry).parameters.values()
    if any(each.default is each.empty for each in settings):
        return None
    with making(entry):
        return entry()


@contextmanager
def guarded(says: str, remedy: str = "", passes: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Run code of others: an exception becomes a `ConfigError` with its type and its text.

    Args:
        says: What cannot be done.
        remedy: What to do, after the text.
        passes: Exceptions that are passed on unchanged.

    Raises:
        ConfigError: In one line, such as `credit 'mine' cannot be measured: TypeError: no number.`
    """
    try:
        yield
    except passes:
        raise
    except Exception as error:
        text = " ".join(told(error).split())
        raise ConfigError(f"{says}: {type(error).__name__}: {text}{remedy}") from error


@contextmanager
def making(entry: Any, before: str = "", passes: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Make an entry, whose class may be of another package: an exception becomes a `ConfigError` that names the class.

    Args:
        entry: Its class.
        before: Beginning of the message.
        passes: Exceptions that are passed on unchanged.

    Raises:
        ConfigError: Such as `my_package.Mine cannot be made: KeyError: 'x'. Correct its class.`
    """
    where = f"{before}{entry.__module__}.{entry.__qualname__}"
    with guarded(f"{where} cannot be made", ". Correct its class.", passes):
        yield


def require_library(package: str, who: str, extra: str, otherwise: str = "") -> None:
    """Raise an error about a missing optional library that names the extra and the part that needs it.

    Raises:
        ConfigError: If it is missing.
    """
    if find_spec(package) is None:
        raise ConfigError(f'{who} needs {package}; run: pip install "perturn[{extra}]"{otherwise}')


def package_of(group: str, name: str) -> str | None:
    """Return the installed package that adds an entry to a group, which is not loaded for that; None for ours."""
    found = (point.dist for point in _entry_points(group=group, name=name) if not _is_ours(point))
    return next((package.name for package in found if package is not None), None)


def missing_methods() -> str:
    """Return a sentence for errors where the entries of `perturn.methods` cannot be found; empty if they can."""
    if any(map(_is_ours, _entry_points(group="perturn.credits"))):
        return ""
    return (
        " Entries of perturn.methods are missing, because Perturn was installed before they moved there; run "
        "`pip install` for Perturn again (pip install -e . in a checkout)."
    )


def _is_ours(point: EntryPoint) -> bool:
    """Return whether an entry point is one of our own distribution, by its module."""
    return point.value.startswith("perturn.")


def _package(point: EntryPoint) -> str:
    """Return the package that an entry point came with."""
    return f"package {point.dist.name}" if point.dist else "a package"


def _entry_points(**wanted: str) -> EntryPoints:
    """Return entry points of installed packages."""
    found: EntryPoints = _installed(tuple(sys.path)).select(**wanted)
    return found


@lru_cache(maxsize=4)
def _installed(path: tuple[str, ...]) -> Any:
    """Return all entry points that are found on a path; to look for them takes some 35 ms."""
    return locate("importlib.metadata:entry_points")()
