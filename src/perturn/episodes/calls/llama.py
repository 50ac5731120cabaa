"""Llama 3: JSON alone, `{"name": ..., "parameters": {...}}`, often after `<|python_tag|>`.

`;` separates several calls. Without the tag, a text is read as calls if all of it has the form of calls. Any other JSON
is a message to the user.

Source: chat templates of Llama 3.1 and 3.2; vLLM's `Llama3JsonToolParser`.
Differs from vLLM: a call without a tag is a message if words follow it; an object is a call only if it has the keys of
a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from perturn.episodes.calls.call import CallFormat, Found, ToolCall, Tools
from perturn.episodes.calls.objects import calls_of, dump
from perturn.io.call_arguments import ARGUMENTS, read_json

_TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"\s*;?\s*")
_BEGUN = re.compile(r'\[?\s*\{\s*(?:"type"\s*:\s*"function"|"name"\s*:)')


def _read(text: str, at: int, tools: Tools) -> Found | None:
    """Return the calls after the tag. The text after them is not part of the calls."""
    at += len(_TAG)
    calls: list[ToolCall] = []
    while True:
        found = read_json(text, at)
        made = calls_of(found[0]) if found else None
        if found is None or made is None:
            return None
        calls += made
        at = _after(text, found[1])
        if not text.startswith(("{", "["), at):
            return Found(found[1], tuple(calls))


def _bare(text: str, at: int) -> Found | None:
    """Return the calls that fill the rest of the text; no calls for a message; None for a call that was cut off."""
    start, calls = at, list[ToolCall]()
    while at < len(text):
        found = read_json(text, at)
        if found is None:
            return None if _BEGUN.match(text, at) else Found(start)
        if not _looks_like_calls(found[0]):
            return Found(start)
        made = calls_of(found[0])
        if made is None:
            return None
        calls += made
        at = _after(text, found[1])
    return Found(at, tuple(calls))


def _after(text: str, at: int) -> int:
    """Return the position where the next call may begin."""
    between = _BETWEEN.match(text, at)
    return at if between is None else between.end()


def _looks_like_calls(value: object) -> bool:
    """Return whether JSON without a tag has the form of calls: a name, and an object under one arguments key."""
    calls = value if isinstance(value, list) else [value]
    return bool(calls) and all(map(_looks_like_a_call, calls))


def _looks_like_a_call(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    value = value["function"] if isinstance(value.get("function"), Mapping) else value
    given = [value[key] for key in ARGUMENTS if key in value]
    return (
        isinstance(value.get("name"), str)
        and len(given) == 1
        and (isinstance(given[0], Mapping) or str(given[0]).lstrip().startswith("{"))
        and not value.keys() - {"name", "id", "type", *ARGUMENTS}
    )


def _write(calls: Sequence[ToolCall]) -> str:
    return "; ".join(dump({"name": call.name, "parameters": dict(call.arguments)}) for call in calls)


LLAMA = CallFormat(
    models="Llama 3.1, 3.2 and 3.3",
    opens=r"<\|python_tag\|>",
    read=_read,
    write=_write,
    marks=(_TAG,),
    bare=_bare,
)
