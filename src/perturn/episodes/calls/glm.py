"""GLM: tags for keys and values, `<tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value></tool_call>`.

Values are text, which `typed` converts by the tool's schema.

Source: chat templates of GLM-4.5 (a line for each tag) and GLM-4.7 (no line breaks); vLLM's `Glm4MoeModelToolParser`.
Differs from vLLM: text besides keys and values, and a key given twice, are malformed here; vLLM ignores them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from perturn.episodes.calls.call import CallFormat, Found, ToolCall, Tools
from perturn.episodes.calls.objects import dump, make_call
from perturn.episodes.calls.typed import typed
from perturn.io.call_arguments import skip_space, unique

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_NAME = r"[^\s<>{}\[\]\"']+"
_BEGIN = re.compile(rf"<tool_call>({_NAME})\s*")
_KEY = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_VALUE_END = re.compile(r"</arg_value>\s*(?=<arg_key>|</tool_call>)")


def _read(text: str, at: int, tools: Tools) -> Found | None:
    """Return one call; None without a closing tag, since arguments may be missing."""
    begin = _BEGIN.match(text, at)
    if begin is None:
        return None
    name, at = begin[1], begin.end()
    pairs: list[tuple[str, Any]] = []
    while key := _KEY.match(text, at):
        end = _VALUE_END.search(text, key.end())
        if end is None:
            return None
        pairs.append((key[1].strip(), typed(text[key.end() : end.start()], name, key[1].strip(), tools)))
        at = end.end()
    at = skip_space(text, at)
    if not text.startswith(_CLOSE, at):
        return None
    try:
        call = make_call(name, unique(pairs))
    except ValueError:
        return None
    return None if call is None else Found(at + len(_CLOSE), (call,))


def _write(calls: Sequence[ToolCall]) -> str:
    return "\n".join(map(_call, calls))


def _call(call: ToolCall) -> str:
    pairs = (
        f"<arg_key>{key}</arg_key>\n<arg_value>{value if isinstance(value, str) else dump(value)}</arg_value>\n"
        for key, value in call.arguments.items()
    )
    return f"{_OPEN}{call.name}\n{''.join(pairs)}{_CLOSE}"


GLM = CallFormat(
    models="GLM-4.5 to 4.7",
    opens=rf"<tool_call>{_NAME}\s*(?:<arg_key>|</tool_call>)",
    read=_read,
    write=_write,
    marks=(_OPEN, _CLOSE),
    tokens=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
