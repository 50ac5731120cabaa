"""Messages about unknown keys and names of a recipe, with suggestions."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from perturn.bounds import EntryOf, hints_of, marks
from perturn.config.peer_settings import peers
from perturn.errors import closest, did_you_mean
from perturn.table import missing_methods
from perturn.table_index import LISTED, TABLES, table

_MOST_SHOWN = 2
"""Largest number of sections that a message names for a key of another section."""
_MOST_ENTRIES = 6
"""Largest number of table entries that a message names for a setting of other entries."""
_FIRST = ("align", "sft", "explore", "evaluate")
"""Sections that a message names first, if several sections have a key."""
_LONGEST = 200
"""Largest number of characters of a key that a message repeats."""


def entry_of(hint: Any) -> EntryOf | None:
    """Return the `EntryOf` mark of a type hint; None if the field does not pick an entry of a table."""
    return next((mark for mark in marks(hint) if isinstance(mark, EntryOf)), None)


def keys_of(kind: Any, where: str = "") -> Iterator[str]:
    """Yield all dotted keys of a settings dataclass: sections, their keys, and `name` of sections that select an entry.

    If a section selects an entry of a table, the keys of all entries of this table are yielded.

    Args:
        kind: The dataclass.
        where: Dotted path at the start of each key.
    """
    hints = hints_of(kind)
    for field in dataclasses.fields(kind):
        path = f"{where}.{field.name}" if where else field.name
        yield path
        mark = entry_of(hints[field.name])
        if mark:
            yield f"{path}.name"
        if mark and mark.shared is not None:
            yield from keys_of(mark.shared, path)
        parts = table(mark.table).values() if mark and mark.default else _parts(hints[field.name])
        yield from dict.fromkeys(key for part in parts for key in keys_of(part, path))


def picks(kind: Any, where: str = "") -> Iterator[tuple[str, EntryOf]]:
    """Yield each dotted key that selects an entry of a table, such as `rows.name`, with the mark of its section."""
    hints = hints_of(kind)
    for field in dataclasses.fields(kind):
        path = f"{where}.{field.name}" if where else field.name
        if mark := entry_of(hints[field.name]):
            yield f"{path}.name", mark
        else:
            for part in _parts(hints[field.name]):
                yield from picks(part, path)


def _parts(hint: Any) -> Iterator[Any]:
    """Yield the dataclasses in a type hint, except dataclasses in a list or a mapping."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    elif typing.get_origin(hint) not in (list, tuple, dict, Sequence, Mapping):
        for part in typing.get_args(hint):
            yield from _parts(part)


def unknown_key(
    key: str,
    value: Any,
    siblings: Sequence[str],
    every: Iterable[str],
    *,
    further: Sequence[str] = (),
    others: Sequence[str] = (),
    typed: str | None = None,
    picked: Iterable[tuple[str, EntryOf]] = (),
) -> str:
    """Return the message about an unknown key, with the key that the user probably meant.

    Args:
        key: Dotted path of the key.
        value: Value of the key. A mapping with one key is the rest of an override, such as `name=dpo` of
            `align.los.name=dpo`.
        siblings: Dotted keys that the section of the key has.
        every: All dotted keys of the recipe.
        further: More keys of the section, such as `name`. The message lists `name` only if the section has no other
            key.
        others: Names of the entries in the section's table that have a setting of this name.
        typed: The whole key as the user wrote it, for the message. None: the key itself.
        picked: Result of `picks`: keys that select an entry of a table, each with its mark.
    """
    said, last = f"unknown key {(typed or key)[:_LONGEST]!r}.", key.rpartition(".")[2]
    if not others and (peer := peers().get(last)) is not None:
        return f"{said} {peer.in_recipe}"
    known, rest, here = list(every), _rest(value), [*siblings, *further]
    unlike = closest(key, here, cutoff=0.75) is None
    listed = f" Known: {', '.join(_listed(siblings, further)) or 'none'}."
    if others and unlike:
        return f"{said} {_of_others(key, others)}{listed}"
    if unlike and (elsewhere := _elsewhere(key, rest, known)):
        return f"{said} Did you mean {' or '.join(map(repr, elsewhere))}?"
    if unlike and (entry := _entry(key, picked)):
        return f"{said} Did you mean {entry!r}?{listed}"
    meant = closest(key, here)
    guess = f" Did you mean {meant!r}?" if meant else ""
    full = f" In full: {_completed(meant, rest, known)}." if meant and rest else ""
    return f"{said}{guess}{full}{listed}"


def _listed(siblings: Sequence[str], further: Sequence[str]) -> list[str]:
    """Return the keys of a section for a message, with `name` only if there is no other key."""
    every = sorted([*siblings, *further])
    return [each for each in every if each in siblings or each.rpartition(".")[2] != "name"] or every


def _entry(key: str, picked: Iterable[tuple[str, EntryOf]]) -> str | None:
    """Return the override that picks the entry named like a key's last part: `rows.name=groups` for `groups`."""
    section, _, last = key.rpartition(".")
    for path, mark in picked:
        if path.startswith(section) and (name := closest(last, table(mark.table), cutoff=0.85)):
            return f"{path}={name}"
    return None


def _of_others(key: str, others: Sequence[str]) -> str:
    """Return the part of a message that names the entries with a setting that the chosen entry lacks."""
    section, _, last = key.rpartition(".")
    more = f" and {len(others) - _MOST_ENTRIES} more" if len(others) > _MOST_ENTRIES else ""
    return f"{last} is a setting of {section}.name={' or '.join(others[:_MOST_ENTRIES])}{more}."


def unknown_name(where: str, name: str, entries: Mapping[str, Any]) -> str:
    """Return the message about an unknown name: the name that was probably meant, or the table that has the name.

    Args:
        where: Dotted path of the section.
        name: The name.
        entries: The table.
    """
    said, listed = f"unknown {where}.name {name!r:.200}.", did_you_mean(name, entries)
    if name.endswith(".py"):
        return f"{said} Name the class in the file, as {name}:Class."
    other = next((kind for kind in TABLES if name in (found := table(kind)) and found is not entries), None)
    if other is None:
        return f"{said}{listed}{missing_methods()}"
    return f"{said} {name!r} is one of `perturn list {other}`. {LISTED[other]}"


def _rest(value: Any) -> list[str]:
    """Return the keys of nested mappings, down to the first mapping that has not exactly one key."""
    found: list[str] = []
    while isinstance(value, Mapping) and len(value) == 1:
        key, value = next(iter(value.items()))
        found.append(str(key))
    return found


def _elsewhere(key: str, rest: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return known keys with the same last part: first keys of the key's section, then keys of `_FIRST`."""
    section, _, last = key.rpartition(".")
    within = [section] if section else []
    first = list(dict.fromkeys((*within, *_FIRST)))
    order = {name: index for index, name in enumerate(first)}
    found = [each for each in known if each.rpartition(".")[2] == last and "." in each]
    found.sort(key=lambda each: (order.get(each.partition(".")[0], len(order)), each.count(".")))
    most = 1 if any(each.startswith(f"{section}.") for each in found[:1]) and section else _MOST_SHOWN
    return [_completed(each, rest, known) for each in found[:most]]


def _completed(key: str, rest: Sequence[str], known: Sequence[str]) -> str:
    """Return a key joined with the keys below it, each replaced by the closest known key."""
    for part in rest:
        below = [each for each in known if each.rpartition(".")[0] == key]
        key = closest(f"{key}.{part}", below) or f"{key}.{part}"
    return key


def item_at(where: str, value: Any, path: Sequence[Any]) -> tuple[str, Any]:
    """Return the dotted path and the value of an item that lies at a path of indices and keys below a value.

    Args:
        where: Dotted path of the value.
        value: The value.
        path: Indices and keys. Parts after the first that the value does not have, such as names of types, are ignored.
    """
    for part in path:
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            where, value = f"{where}[{part}]", value[part]
        elif isinstance(value, Mapping) and part in value:
            where, value = f"{where}.{part}", value[part]
        else:
            break
    return where, value
