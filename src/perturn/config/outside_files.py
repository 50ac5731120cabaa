"""Find the settings of a recipe that name files outside its run folder, by the marks on their fields."""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from perturn.bounds import EntryOf, Outside, hints_of, marks
from perturn.config.recipe import Recipe
from perturn.io.user_code import imported_name
from perturn.table import at_defaults
from perturn.table_index import entry_named, table

_WRITTEN = re.compile(
    r"(^|[\W_])(logs?|out|outputs?|caches?|saved?|te?mp|dumps?|traces?|results?)($|[\W_])", re.IGNORECASE
)


@dataclass(frozen=True)
class Named:
    """A setting that names an input from outside the run folder."""

    setting: str
    """Dotted key, such as `rows.path` or `environment.questions.train`."""
    text: str
    """Value of the setting, such as a path."""
    kind: str
    """Kind of the value; see `perturn.bounds.Outside`."""


def written(name: str) -> bool:
    """Return whether the name of a setting or file suggests an output, such as a log or a cache."""
    return _WRITTEN.search(name) is not None


def named_inputs(recipe: Recipe) -> list[Named]:
    """Return the settings of a recipe that may name files outside its run folder.

    The settings of a user's class (`file.py:Class`) have no marks, so each text among them may name a file.
    """
    found = _within(recipe, type(recipe), "")
    return [each for each in found if recipe.base is None or each.setting != "model.name"]


def _within(value: Any, hint: Any, where: str) -> Iterator[Named]:
    """Yield the inputs that a value names, found by the marks of its type hint."""
    found = list(marks(hint))
    outside = next((each for each in found if isinstance(each, Outside)), None)
    entry = next((each for each in found if isinstance(each, EntryOf)), None)
    if outside is not None:
        yield from _texts(value, outside.kind, where)
    elif entry is not None and not dataclasses.is_dataclass(value):
        yield from _of_entry(value or {}, entry, where)
    elif dataclasses.is_dataclass(value):
        own = imported_name(type(value)) if entry is not None else None
        if own is not None:
            yield Named(f"{where}.name", own, "code")
            yield from _of_needs(value, where)
            hints = hints_of(type(value))
            unmarked = {name: getattr(value, name) for name in hints if not list(marks(hints[name]))}
            yield from _texts(unmarked, "maybe", where)
        settings = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        yield from _settings(settings, type(value), where)
    elif isinstance(value, Mapping):
        parts = [each for each in (hint, *typing.get_args(hint)) if isinstance(each, type)]
        kind = next(filter(dataclasses.is_dataclass, parts), None)
        if kind is not None:
            yield from _settings(value, kind, where)


def _settings(values: Mapping[str, Any], kind: Any, where: str) -> Iterator[Named]:
    """Yield the inputs among the settings of a class."""
    hints = hints_of(kind)
    for name, value in values.items():
        if name in hints:
            yield from _within(value, hints[name], f"{where}.{name}".lstrip("."))


def _of_entry(section: Mapping[str, Any], entry: EntryOf, where: str) -> Iterator[Named]:
    """Yield the inputs of a section whose `name` is an entry of a table or a class of the user's."""
    name = str(section.get("name"))
    shared = {each.name for each in dataclasses.fields(entry.shared)} if entry.shared else set()
    settings = {key: value for key, value in section.items() if key not in ("name", *shared)}
    if ":" in name:
        yield Named(f"{where}.name", name, "code")
        yield from _of_needs(entry_named(entry.table, name), where)
        yield from _texts(settings, "maybe", where)
    elif (kind := table(entry.table).get(name)) is not None:
        yield from _settings(settings, kind, where)


def _of_needs(entry: Any, where: str) -> Iterator[Named]:
    """Yield the files of the quantities that the user's class, or an object of it, names in `needs`."""
    needs = entry.needs if "needs" in dir(entry) else ()
    if isinstance(needs, property):  # they depend on settings, of which the defaults are known
        made = at_defaults(entry)
        needs = () if made is None else made.needs
    for index, need in enumerate(needs if isinstance(needs, tuple) else ()):
        if isinstance(need, str) and ":" in need:
            yield Named(f"{where}.needs[{index}]", need, "code")


def _texts(value: Any, kind: str, where: str) -> Iterator[Named]:
    """Yield an input for each text in a value. A text in a list or mapping has its own dotted key."""
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        items = ((f"{where}.{key}", each) for key, each in value.items())
    elif isinstance(value, list | tuple):
        items = ((f"{where}[{index}]", each) for index, each in enumerate(value))
    elif isinstance(value, str | os.PathLike) and not (kind == "maybe" and written(where.rpartition(".")[2])):
        yield Named(where, str(value), "path" if kind == "maybe" else kind)
    for key, each in items:
        yield from _texts(each, kind, key)
