"""JSON in the text of a policy -> calls, taken exactly as they are written or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from perturn.episodes.calls.call import ToolCall
from perturn.io.plain import fault

ARGUMENTS = ("arguments", "parameters", "args")
"""Keys under which models write the arguments of a call."""
_OF_A_CALL = {"name", "id", "type", *ARGUMENTS}
_AROUND_A_CALL = {"function", "id", "type", "index"}

_SPACE = re.compile(r"\s*")


def skip_space(text: str, at: int) -> int:
    """Where the next character stands that is no white space."""
    space = _SPACE.match(text, at)
    return at if space is None else space.end()


def closed(text: str, at: int, mark: str, *others: str) -> int | None:
    """Where a call ends that has been read up to here: after its closing mark, or with the text.

    Args:
        text: The text.
        at: Where the call has been read up to.
        mark: What closes it.
        others: Marks before which it is closed too.

    Returns:
        The place; None if something else stands there.
    """
    at = skip_space(text, at)
    if text.startswith(mark, at):
        return at + len(mark)
    return at if at == len(text) or text.startswith(others, at) else None


def read_json(text: str, at: int) -> tuple[Any, int] | None:
    """The JSON value that begins here, after white space, and where it ends; None if there is none.

    A line break within a string is taken as it is. A key that is given twice is no JSON: nobody knows which is meant.
    """
    try:
        return _DECODER.raw_decode(text, skip_space(text, at))
    except (ValueError, RecursionError):
        return None


def dump(value: Any) -> str:
    """A value as JSON on one line."""
    return json.dumps(value, ensure_ascii=False)


def read_arguments(given: object) -> dict[str, Any] | None:
    """Arguments from an object, or from the JSON text of one; None for anything else. An empty text has none."""
    if isinstance(given, str):
        found = read_json(given, 0) if given.strip() else ({}, len(given))
        given = found[0] if found and skip_space(given, found[1]) == len(given) else None
    return dict(given) if isinstance(given, Mapping) and not fault(dict(given), "arguments") else None


def make_call(name: object, given: object) -> ToolCall | None:
    """A call with a name and arguments, all plain data; None for anything else."""
    arguments = read_arguments(given)
    if arguments is None or not (isinstance(name, str) and name) or fault(name, "name"):
        return None
    return ToolCall(name, arguments)


def call_of(found: object) -> ToolCall | None:
    """A call from its JSON object; None if it does not say clearly what to call, and with which arguments.

    Arguments may stand under any key of `ARGUMENTS`, or under several if they are equal. None are an empty object. A
    key that means nothing to us makes the call unclear: to leave it out could call the tool with other arguments.
    """
    if not isinstance(found, Mapping) or found.get("type", "function") != "function":
        return None
    if isinstance(inner := found.get("function"), Mapping):
        return None if found.keys() - _AROUND_A_CALL else call_of(inner)
    if found.keys() - _OF_A_CALL:
        return None
    given = [found[key] for key in ARGUMENTS if found.get(key) is not None]
    made = [make_call(found.get("name"), each) for each in given or [{}]]
    return made[0] if all(each == made[0] for each in made) else None


def calls_of(found: object) -> tuple[ToolCall, ...] | None:
    """Calls of a JSON object, or of a list of them; None if one is unclear or there is none."""
    return together(map(call_of, found if isinstance(found, list) else [found]))


def together(made: Iterable[ToolCall | None]) -> tuple[ToolCall, ...] | None:
    """Calls of one action; None if one is malformed or there is none."""
    calls = tuple(made)
    return tuple(call for call in calls if call is not None) if calls and None not in calls else None


def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """An object of keys and values.

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
