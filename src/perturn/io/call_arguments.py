"""Read the arguments of tool calls from JSON, exactly as they are written or not at all."""

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
    """Return the JSON value that begins at `at`, after white space, and the position after it; None if there is none.

    A line break in a string is accepted. An object with a repeated key is not read, since either value could be meant.
    """
    try:
        return _DECODER.raw_decode(text, skip_space(text, at))
    except (ValueError, RecursionError):
        return None


def read_arguments(given: object) -> dict[str, Any] | None:
    """Return arguments from an object or its JSON text; an empty text gives no arguments. None for anything else."""
    if isinstance(given, str):
        found = read_json(given, 0) if given.strip() else ({}, len(given))
        given = found[0] if found and skip_space(given, found[1]) == len(given) else None
    return dict(given) if isinstance(given, Mapping) and not fault(dict(given), "arguments") else None


def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dictionary from pairs of keys and values.

    Raises:
        ValueError: If a key is repeated.
    """
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {key!r:.60} is given twice")
        made[key] = value
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=unique, strict=False)
