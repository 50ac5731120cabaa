"""Read calls from JSON. A call is read exactly as it is written, or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from perturn.episodes.calls.call import ToolCall
from perturn.io.call_arguments import ARGUMENTS, read_arguments, skip_space
from perturn.io.plain_data import fault

_OF_A_CALL = {"name", "id", "type", *ARGUMENTS}
_AROUND_A_CALL = {"function", "id", "type", "index"}


def closed(text: str, at: int, mark: str, *others: str) -> int | None:
    """Return the position after a call, which ends with a closing mark or with the text.

    Args:
        text: The text.
        at: Position up to which the call was read.
        mark: Mark that closes the call.
        others: Marks that may follow the call if it has no closing mark.

    Returns: The position; None if other text follows the call.
    """
    at = skip_space(text, at)
    if text.startswith(mark, at):
        return at + len(mark)
    return at if at == len(text) or text.startswith(others, at) else None


def dump(value: Any) -> str:
    """Return a value as JSON on one line."""
    return json.dumps(value, ensure_ascii=False)


def make_call(name: object, given: object) -> ToolCall | None:
    """Return a call; None if the name is not a text or the arguments are not plain data."""
    arguments = read_arguments(given)
    if arguments is None or not (isinstance(name, str) and name) or fault(name, "name"):
        return None
    return ToolCall(name, arguments)


def call_of(found: object) -> ToolCall | None:
    """Return a call from its JSON object; None if its name or its arguments are ambiguous.

    Arguments may stand under any key of `ARGUMENTS`, or under several keys if they are equal. A call without arguments
    has an empty object. An unknown key makes the call ambiguous: if it were ignored, the tool might get the wrong
    arguments.
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
    """Return the calls of a JSON object or a list of objects; None if a call is ambiguous or there is no call."""
    return together(map(call_of, found if isinstance(found, list) else [found]))


def together(made: Iterable[ToolCall | None]) -> tuple[ToolCall, ...] | None:
    """Return the calls of one action; None if a call is malformed or there is no call."""
    calls = tuple(made)
    return tuple(call for call in calls if call is not None) if calls and None not in calls else None
