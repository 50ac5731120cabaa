"""Suggestions for keys and names that do not exist."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from perturn.bounds import EntryOf, hints_of, marks
from perturn.config.peer_settings import peers
from perturn.errors import closest, did_you_mean
from perturn.table import Table, missing_methods
from perturn.table_index import LISTED, TABLES, table

_MOST_SHOWN = 2
"""Places that a message names for a key that belongs elsewhere."""
_MOST_ENTRIES = 6
"""Entries of a table that a message names for a setting that they have."""
_FIRST = ("align", "sft", "explore", "evaluate")
"""Sections that are named first where a key is in several."""
_LONGEST = 200
"""Characters of a key that a message repeats."""


def entry_of(hint: Any) -> EntryOf | None:
    """Return the mark of a field that picks an entry of a table; None: the field picks none."""
    return next((mark for mark in marks(hint) if isinstance(mark, EntryOf)), None)


def keys_of(kind: Any, where: str = "") -> Iterator[str]:
    """Yield all dotted keys of a settings dataclass: sections, their keys, and `name` where it picks from a table.

    Of a section that is parsed into an entry these are the keys of all entries of its table.

    Args:
        kind: The dataclass.
        where: Dotted path that its keys begin with.
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


def picks(kind: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted keys of a settings dataclass that pick an entry, such as `rows.name`, each with its table."""
    hints = hints_of(kind)
    for field in dataclasses.fields(kind):
        path = f"{where}.{field.name}" if where else field.name
        if mark := entry_of(hints[field.name]):
            yield f"{path}.name", mark.table
        else:
            for part in _parts(hints[field.name]):
                yield from picks(part, path)


def _parts(hint: Any) -> Iterator[Any]:
    """Yield the dataclasses within a type, but not those within a list or a mapping."""
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
    picked: Iterable[tuple[str, str]] = (),
) -> str:
    """Return the message about a key that does not exist, with the key that was meant.

    Args:
        key: Dotted path of the key.
        value: Its value; a mapping with a single key tells the rest of an override such as `align.los.name=dpo`.
        siblings: Dotted keys that its section has.
        every: All dotted keys of the recipe.
        further: Keys that the section has too, such as `name`, which is listed if there is no other one.
        others: Names of entries of the section's table that have such a setting.
        typed: The whole key as it was written, which the message then shows; None: the key.
        picked: Keys that pick an entry, each with its table, as `picks` yields them.
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
    """Return the keys of a section that a message lists: `name` only where there is no other one."""
    every = sorted([*siblings, *further])
    return [each for each in every if each in siblings or each.rpartition(".")[2] != "name"] or every


def _entry(key: str, picked: Iterable[tuple[str, str]]) -> str | None:
    """Return the word that picks the entry named like a key's last part, such as `rows.name=groups` for `groups`."""
    section, _, last = key.rpartition(".")
    for path, kind in picked:
        if path.startswith(section) and (name := closest(last, table(kind), cutoff=0.85)):
            return f"{path}={name}"
    return None


def _of_others(key: str, others: Sequence[str]) -> str:
    """Return which entries have a setting that the chosen one lacks."""
    section, _, last = key.rpartition(".")
    more = f" and {len(others) - _MOST_ENTRIES} more" if len(others) > _MOST_ENTRIES else ""
    return f"{last} is a setting of {section}.name={' or '.join(others[:_MOST_ENTRIES])}{more}."


def unknown_name(where: str, name: str, entries: Mapping[str, Any]) -> str:
    """Return the message about a name that a table lacks: the name that was meant, or the table that has it.

    Args:
        where: Dotted path of the section.
        name: The name.
        entries: The table.
    """
    said, listed = f"unknown {where}.name {name!r:.200}.", did_you_mean(name, entries)
    if ":" in name and isinstance(entries, Table):
        return (
            f"{said} It must be a name of the table; a package adds a class of its own as an entry point of "
            f"{entries.group} (docs: perturn.table.Table).{listed}"
        )
    other = next((kind for kind in TABLES if name in (found := table(kind)) and found is not entries), None)
    if other is None:
        return f"{said}{listed}{missing_methods()}"
    return f"{said} {name!r} is one of `perturn list {other}`. {LISTED[other]}"


def _rest(value: Any) -> list[str]:
    """Return the keys below a key, where there is one at each level."""
    found: list[str] = []
    while isinstance(value, Mapping) and len(value) == 1:
        key, value = next(iter(value.items()))
        found.append(str(key))
    return found


def _elsewhere(key: str, rest: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return keys with the same last part in other sections: first within the key's section, then in the usual ones."""
    section, _, last = key.rpartition(".")
    within = [section] if section else []
    first = list(dict.fromkeys((*within, *_FIRST)))
    order = {name: index for index, name in enumerate(first)}
    found = [each for each in known if each.rpartition(".")[2] == last and "." in each]
    found.sort(key=lambda each: (order.get(each.partition(".")[0], len(order)), each.count(".")))
    most = 1 if any(each.startswith(f"{section}.") for each in found[:1]) and section else _MOST_SHOWN
    return [_completed(each, rest, known) for each in found[:most]]


def _completed(key: str, rest: Sequence[str], known: Sequence[str]) -> str:
    """Return a key with the keys below it, each as it was probably meant."""
    for part in rest:
        below = [each for each in known if each.rpartition(".")[0] == key]
        key = closest(f"{key}.{part}", below) or f"{key}.{part}"
    return key
