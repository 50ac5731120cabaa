"""Tables of named entries: built-in entries, and entries that installed packages add through entry points."""

from __future__ import annotations

import inspect
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
from perturn.io.plain_data import error_text
from perturn.io.user_code import imported_name, own_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

T = TypeVar("T")

_SIMILAR = 0.85
"""Minimum similarity of a name that counts as misspelt, in [0, 1]. For example, `expert` and `experts` have a
similarity of 0.92, and `expert` and `export` of 0.83."""


class Table(Mapping[str, T], Generic[T]):
    """Mapping from a name to an entry. An entry is loaded when it is first looked up.

    A package adds an entry in its `pyproject.toml`:

        [project.entry-points."perturn.losses"]
        my-loss = "my_package.my_loss:MyLoss"
    """

    def __init__(self, group: str, own: Mapping[str, T | str]) -> None:
        """Make a table of built-in entries.

        Args:
            group: Group of entry points that add entries to the table.
            own: Name -> built-in entry, or its location as `module:object` if it is slow to load.
        """
        self.group = group
        self._own = own

    @cached_property
    def _foreign(self) -> dict[str, EntryPoint]:
        """Name -> entry point, for the entries of `perturn.methods` and of other installed packages.

        The entry points of Perturn come first. If two packages add one name, the error then names the other package.
        """
        found: dict[str, EntryPoint] = {}
        for point in sorted(
            _entry_points(group=self.group), key=_is_ours, reverse=True
        ):  # Perturn's entries first
            says = f"{_package(point)} adds to {self.group} the name"
            check_free(point.name, [*self._own, *found], says, "Rename it, or uninstall the package.")
            found[point.name] = point
        return found

    def __getitem__(self, name: str) -> T:
        point = self._foreign.get(name)  # also checks that no package adds the name of a built-in entry
        if point is None:
            entry = self._own[name]
            return cast(T, locate(entry)) if isinstance(entry, str) else entry
        try:
            return cast(T, point.load())
        except Exception:
            # Reading the package's name from a file takes longer than loading an entry, so it happens only on an error.
            with guarded(f"{name!r} of {_package(point)} cannot be loaded from {point.value!r}"):
                raise

    def target(self, name: str) -> str:
        """Return the location of an entry as `module:object`; empty if the table holds the object itself."""
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
    """Return the name of a class in a table. A class of the user's code has the name by which it was imported.

    Entries with the location of the class are compared first, so usually no other entry is loaded.

    Raises:
        ConfigError: If the class is neither in the table nor imported by its name.
    """
    names, first = list(entries), ("", f"{kind.__module__}:{kind.__qualname__}")
    if isinstance(entries, Table):
        names.sort(key=lambda name: entries.target(name) not in first)
        if (own := imported_name(kind)) is not None and not any(
            entries.target(name) in first for name in names
        ):
            return own
    found = next((name for name in names if entries[name] is kind), None)
    if found is None:
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} is not in its table, which has {', '.join(entries)}; add an "
            "entry point to your package (docs: perturn.table.Table)."
        )
    return found


def locate(where: str) -> Any:
    """Import and return the object at the location `module:object`.

    Tables store such locations for entries that are slow to import, for example because they import torch.
    """
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


def check_names(
    entry: type, *, kind: str, known: Collection[str], traits: type | None = None, overrides: bool = True
) -> None:
    """Reject a class with a public attribute whose name is misspelt, or is the name of a trait.

    Nothing would read such an attribute. Dataclass fields are settings, and may have any name. A name counts as
    misspelt only if its class lacks the intended name, so `steps` next to `step` is allowed. If only a base class has
    the intended name, such as a default `check`, the name is a misspelt override.

    Args:
        entry: Class of the entry.
        kind: Kind of the entry, such as `credit`, for the message.
        known: Allowed names of attributes: the members of the table's protocol.
        traits: Dataclass of the traits, which belong in `traits` and not among the attributes.
        overrides: Whether the class extends a class of ours, so that names that override a base class and a missing
            decorator are checked. False: the class and its base classes may be any code of others.

    Raises:
        ConfigError: If the class has such an attribute.
    """
    settings = {each.name for each in fields(entry)} if is_dataclass(entry) else set[str]()
    if overrides:
        check_decorated(entry, kind, known)
    public = {name for each in entry.__mro__[:-1] for name in vars(each) if not name.startswith("_")}
    declared = {each.name: f"{traits.__name__}({each.name}=...)" for each in fields(traits)} if traits else {}
    meant = declared | {name: name for name in known}
    for name in sorted(public - settings - set(known)):
        present = _beside(entry, name) if overrides else public
        found = closest(name, meant.keys() - (present - declared.keys()), _SIMILAR)
        if found is not None:
            remedy = " Begin the name of a helper with `_`." if callable(getattr(entry, name)) else ""
            raise ConfigError(
                f"{kind} {entry.__name__} has {name!r}, which is never read. Did you mean `{meant[found]}`?{remedy}"
            )


def check_decorated(entry: type, kind: str, known: Collection[str]) -> None:
    """Reject a class whose settings are no settings, since it lacks the decorator of a dataclass."""
    own = vars(entry)
    if "__dataclass_fields__" in own or "__init__" in own:
        return
    for name, hint in inspect.get_annotations(entry).items():
        if name in own and name not in known and not name.startswith("_") and "ClassVar" not in str(hint):
            raise ConfigError(
                f"{kind} {entry.__name__} has {name!r}, which is no setting without a decorator. Write "
                "@dataclass(frozen=True) above the class, or ClassVar in the annotation."
            )


def _beside(entry: type, name: str) -> set[str]:
    """Return the attributes of the class that has a name, and of the classes below it."""
    owner = next(index for index, each in enumerate(entry.__mro__) if name in vars(each))
    return {attribute for each in entry.__mro__[: owner + 1] for attribute in vars(each)}


def check_members(entry: object, members: Iterable[str], kind: str, protocol: str) -> None:
    """Reject an entry that lacks a member of its protocol.

    Args:
        entry: Instance of the entry.
        members: Names of the required members.
        kind: Kind of the entry, such as `loss`, for the message.
        protocol: Location of the protocol, for the message.

    Raises:
        ConfigError: Such as `loss Mine must have 'rewards', and has none; see perturn.losses.Loss.`
    """
    for member in members:
        if member not in dir(entry):
            raise ConfigError(
                f"{kind} {type(entry).__name__} must have {member!r}, and has none; see {protocol}."
            )


def at_defaults(entry: Callable[..., T]) -> T | None:
    """Return an entry made with its default settings; None if a setting has no default.

    Raises:
        ConfigError: If the class raises an error.
    """
    settings = signature(entry).parameters.values()
    if any(each.default is each.empty for each in settings):
        return None
    with making(entry):
        return entry()


@contextmanager
def guarded(says: str, remedy: str = "", passes: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Run third-party code; turn an exception into a `ConfigError` with the type and text of the exception.

    Args:
        says: Beginning of the message, which says what failed.
        remedy: End of the message, which says what to do.
        passes: Exceptions to re-raise unchanged.

    Raises:
        ConfigError: One line, such as `credit 'mine' cannot be measured: TypeError: no number (at mine.py:7).`
    """
    try:
        yield
    except passes:
        raise
    except Exception as error:
        text = " ".join(error_text(error).split())
        raise ConfigError(f"{says}: {type(error).__name__}: {text}{own_line(error)}{remedy}") from error


@contextmanager
def making(entry: Any, before: str = "", passes: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Make an entry whose class may be third-party; turn an exception into a `ConfigError` that names the class.

    Args:
        entry: Class of the entry.
        before: Text before the name of the class in the message.
        passes: Exceptions to re-raise unchanged.

    Raises:
        ConfigError: Such as `my_package.Mine cannot be made: KeyError: 'x'. Correct its class.`
    """
    where = f"{before}{entry.__module__}.{entry.__qualname__}"
    with guarded(f"{where} cannot be made", ". Correct its class.", passes):
        yield


def require_library(package: str, who: str, extra: str, otherwise: str = "") -> None:
    """Raise an error if an optional library is missing, with the command that installs it.

    Args:
        package: Import name of the library.
        who: Part of Perturn that needs the library, for the message.
        extra: Extra of Perturn that installs the library.
        otherwise: End of the message, such as another remedy.

    Raises:
        ConfigError: If the library is missing.
    """
    if find_spec(package) is None:
        raise ConfigError(f'{who} needs {package}; run: pip install "perturn[{extra}]"{otherwise}')


def package_of(group: str, name: str) -> str | None:
    """Return the name of the third-party package that adds an entry, without loading the entry; None: no package."""
    found = (point.dist for point in _entry_points(group=group, name=name) if not _is_ours(point))
    return next((package.name for package in found if package is not None), None)


def missing_methods() -> str:
    """Return a sentence for error messages if the entries of `perturn.methods` are not installed; empty if they are."""
    if any(map(_is_ours, _entry_points(group="perturn.credits"))):
        return ""
    return (
        " Entries of perturn.methods are missing, because Perturn was installed before they moved there; run "
        "`pip install` for Perturn again (pip install -e . in a checkout)."
    )


def _is_ours(point: EntryPoint) -> bool:
    """Return whether an entry point belongs to Perturn, by the name of its module."""
    return point.value.startswith("perturn.")


def _package(point: EntryPoint) -> str:
    """Return the package of an entry point, in words."""
    return f"package {point.dist.name}" if point.dist else "a package"


def _entry_points(**wanted: str) -> EntryPoints:
    """Return the entry points of installed packages that match a group or a name."""
    found: EntryPoints = _installed(tuple(sys.path)).select(**wanted)
    return found


@lru_cache(maxsize=4)
def _installed(path: tuple[str, ...]) -> Any:
    """Return all entry points on the import path. The search takes about 35 ms, so its result is cached."""
    return locate("importlib.metadata:entry_points")()
