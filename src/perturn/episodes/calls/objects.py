"""Read calls from JSON in the text of a policy, exactly as they are written or not at all."""

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
    """Return where a call ends that has been read up to here: after its closing mark, or with the text.

    Args:
        text: The text.
        at: Where the call has been read up to.
        mark: What closes it.
        others: Marks before which it is closed too.

    Returns: The position; None if something else is written there.
    """
    at = skip_space(text, at)
    if text.startswith(mark, at):
        return at + len(mark)
    return at if at == len(text) or text.startswith(others, at) else None


def dump(value: Any) -> str:
    """Return a value as JSON on one line."""
    return json.dumps(value, ensure_ascii=False)


def make_call(name: object, given: object) -> ToolCall | None:
    """Return a call with a name and arguments, all plain data; None for anything else."""
    arguments = read_arguments(given)
    if arguments is None or not (isinstance(name, str) and name) or fault(name, "name"):
        return None
    return ToolCall(name, arguments)


def call_of(found: object) -> ToolCall | None:
    """Return a call from its JSON object; None if its tool or its arguments are not clear.

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
    """Return calls of a JSON object, or of a list of them; None if one is unclear or there is none."""
    return together(map(call_of, found if isinstance(found, list) else [found]))


def together(made: Iterable[ToolCall | None]) -> tuple[ToolCall, ...] | None:
    """Return calls of one action; None if one is malformed or there is none."""
    calls = tuple(made)
    return tuple(call for call in calls if call is not None) if calls and None not in calls else None
