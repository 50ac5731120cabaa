"""Apply `key=value` overrides to the mapping of a recipe."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, reduce
from typing import Any

from perturn.bounds import EntryOf
from perturn.config.key_suggestions import picks
from perturn.config.parsing import refuse_secrets, settings_of
from perturn.errors import ConfigError, check_fit
from perturn.io.read_input import has_comment, parse_yaml
from perturn.table import locate
from perturn.table_index import entry_named

_DEEPEST_KEY = 20
"""Largest number of sections in the key of an override."""
_RATE = "learning_rate"
_USUAL = "local"
"""Entry of the sections `engine` and `backend` if they name none; see `Recipe`."""


def apply_overrides(data: dict[str, Any], words: Sequence[str]) -> None:
    """Apply overrides such as `a.b=value` to a recipe's mapping, in place, and reject API keys in the mapping.

    The values are YAML. If an override replaces the `name` of a section such as `rows`, settings of the mapping that
    the new entry lacks are dropped. Settings that are overrides themselves are kept, in any order.
    """
    changes = [(*_key_and_value(word), word) for word in words]
    drop_replaced(data, {key: value for key, value, _ in changes})
    for index, (key, value, word) in enumerate(changes, 1):
        set_key(data, key, value, word, rates_or_removed(each[:2] for each in changes[index:]))
    refuse_secrets(data)


def _key_and_value(word: str) -> tuple[str, Any]:
    """Return the dotted key of an override, and its value."""
    key, equals, text = word.partition("=")
    must = "look like key=value, such as seed=1 or align.loss.beta=0.2"
    check_fit(equals and key, "an override", must, word)
    where = f"override {word[:80]!r}: the value"
    value = parse_yaml(text, where, ConfigError, keep_texts=True)
    remedy = f"Write it in quotes, as in '{key[:80]}=\"a # b\"'."
    check_fit(not has_comment(text), where, "have no comment, which ` #` begins", text, remedy)
    return key, value


def set_key(
    data: dict[str, Any], path: str, value: Any, word: str | None = None, later: Collection[str] = ()
) -> None:
    """Set a dotted key of a recipe's mapping, in place. Missing sections are added.

    Args:
        data: The mapping.
        path: Dotted key, such as `align.loss.beta`.
        value: New value of the key. It replaces the old value or section.
        word: The whole override, for messages. None: messages show the key alone.
        later: Keys that later changes set, or whose section they remove; see `rates_or_removed`.

    Raises:
        ConfigError: If a part of the key is no section, or a new section lacks the learning rate of the old one and no
            later change sets it.
    """
    said = f"override {(word or path)[:200]!r}"
    *parents, last = path.split(".")
    most = f"have at most {_DEEPEST_KEY} parts before its name"
    check_fit(len(parents) <= _DEEPEST_KEY, f"the key of {said[:90]}", most, len(parents))
    section: Any = data
    for depth, parent in enumerate(parents, 1):
        if section.get(parent) is None:
            section[parent] = {}
        section = section[parent]
        at = f"{said}: {'.'.join(parents[:depth])[:200]}"
        check_fit(isinstance(section, dict), at, "be a section", section)
    before = section.get(last)
    settled = path in later or f"{path}.{_RATE}" in later
    replaced = isinstance(before, dict) and isinstance(value, dict) and not settled
    if replaced and _RATE in before.keys() - value.keys():
        at, changed = path[:200], next(iter(value), _RATE)
        raise ConfigError(
            f"{said} replaces the whole section, and would drop its {_RATE}, {before[_RATE]!s:.40}. "
            f"Set {_RATE} too, or only the keys that change, such as {at}.{changed!s:.40}."
        )
    section[last] = value


def rates_or_removed(changes: Iterable[tuple[str, Any]]) -> set[str]:
    """Return the keys of changes that set a learning rate or remove a section."""
    return {key for key, value in changes if value is None or key.endswith(f".{_RATE}")}


def drop_replaced(data: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Drop the settings that the entry of a section has and its new entry lacks, in place.

    Args:
        data: Mapping of a recipe, before the changes.
        changes: Dotted key -> new value. The key `rows.name` replaces the entry of the section `rows`.
    """
    for path, mark in _entries():
        *parents, last = path.split(".")
        section: Any = reduce(_part, parents, data)
        if path not in changes or not isinstance(section, dict):
            continue
        before = entry_named(mark.table, str(section.get(last, mark.default or _USUAL)))
        after = entry_named(mark.table, str(changes[path]))
        if before is not None and after is not None:
            for key in settings_of(before).keys() - settings_of(after).keys():
                section.pop(key, None)
    if isinstance(data.get("then"), dict):  # another recipe
        its = {key.removeprefix("then."): each for key, each in changes.items() if key.startswith("then.")}
        drop_replaced(data["then"], its)


def _part(section: Any, key: str) -> Any:
    return section.get(key) if isinstance(section, dict) else None


@cache
def _entries() -> tuple[tuple[str, EntryOf], ...]:
    """Return the keys of a recipe that select an entry of a table, each with its mark."""
    return tuple(picks(locate("perturn.config.recipe:Recipe")))
