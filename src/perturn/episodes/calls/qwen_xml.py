"""Qwen's XML: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

Values are text, which `typed` converts by the tool's schema.

Source: chat templates of Qwen3-Coder, Qwen3.5 and Nemotron 3; vLLM's `Qwen3CoderToolParser`.
Differs from vLLM: a parameter without closing tag, a word between tags and a key given twice are malformed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from perturn.episodes.calls.call import CallFormat, Found, ToolCall, Tools
from perturn.episodes.calls.objects import closed, dump, make_call, together
from perturn.episodes.calls.typed import typed
from perturn.io.call_arguments import skip_space, unique

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*")
_FUNCTION_END = "</function>"
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>")
_PARAMETER_END = re.compile(r"</parameter>\s*(?=<parameter=|</function>)")


def _read(text: str, at: int, tools: Tools) -> Found | None:
    """Return the calls of one or several functions in a tag. Qwen3-Coder may leave the outer tag out."""
    tagged = text.startswith(_OPEN, at)
    at += len(_OPEN) * tagged
    calls: list[ToolCall | None] = []
    while function := _FUNCTION.match(text, at):
        name, at = function[1].strip(), function.end()
        pairs: list[tuple[str, Any]] = []
        while parameter := _PARAMETER.match(text, at):
            end = _PARAMETER_END.search(text, parameter.end())
            if end is None:
                return None
            key, value = parameter[1].strip(), text[parameter.end() : end.start()]
            pairs.append((key, typed(value.removeprefix("\n").removesuffix("\n"), name, key, tools)))
            at = end.end()
        at = skip_space(text, at)
        if not text.startswith(_FUNCTION_END, at):
            return None
        at += len(_FUNCTION_END)
        try:
            calls.append(make_call(name, unique(pairs)))
        except ValueError:
            return None
    made, end_of_call = together(calls), closed(text, at, _CLOSE, _OPEN)
    if end_of_call is None and not tagged:
        end_of_call = at
    return None if made is None or end_of_call is None else Found(end_of_call, made)


def _write(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"{_OPEN}\n{_function(call)}\n{_CLOSE}" for call in calls)


def _function(call: ToolCall) -> str:
    lines = [f"<function={call.name}>"]
    for key, value in call.arguments.items():
        lines += [f"<parameter={key}>", _value(value), "</parameter>"]
    return "\n".join([*lines, _FUNCTION_END])


def _value(value: Any) -> str:
    """Return a value as Qwen's templates write it: objects and lists as JSON, other values as Python's `str`."""
    return dump(value) if isinstance(value, dict | list) else str(value)


QWEN_XML = CallFormat(
    models="Qwen3-Coder, Qwen3.5 to 3.8, Nemotron 3",
    opens=r"<tool_call>\s*<function=|<function=",
    read=_read,
    write=_write,
    marks=(_OPEN, _CLOSE),
)
