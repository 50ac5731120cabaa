"""Arguments of tool calls: JSON that is read exactly as it is written, or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from perturn.io.plain_data import fault

ARGUMENTS = ("arguments", "parameters", "args")
"""Keys under which models write the arguments of a call."""

_SPACE = re.compile(r"\s*")


def skip_space(text: str, at: int) -> int:
    """Return the position of the next character that is not white space."""
    space = _SPACE.match(text, at)
    return at if space is None else space.end()


def read_json(text: str, at: int) -> tuple[Any, int] | None:
    """Return the JSON value that begins here, after white space, and where it ends; None if there is none.

    A line break within a string is accepted. A key that is given twice is an error, since either could be meant.
    """
    try:
        return _DECODER.raw_decode(text, skip_space(text, at))
    except (ValueError, RecursionError):
        return None


def read_arguments(given: object) -> dict[str, Any] | None:
    """Return arguments from an object, or from the JSON text of one; None for anything else. An empty text has none."""
    if isinstance(given, str):
        found = read_json(given, 0) if given.strip() else ({}, len(given))
        given = found[0] if found and skip_space(given, found[1]) == len(given) else None
    return dict(given) if isinstance(given, Mapping) and not fault(dict(given), "arguments") else None


def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of keys and values.

    Raises:
        ValueError: If a key is there twice.
    """
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {key!r:.60} is given twice")
        made[key] = value
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=unique, strict=False)
