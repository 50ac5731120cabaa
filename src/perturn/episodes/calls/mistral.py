"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and since 2025 `[TOOL_CALLS]NAME[ARGS]{...}`.

Source: tokenizers v3 to v13 of mistral-common, where v11 also writes `[CALL_ID]` and the id of the call; vLLM's
`MistralToolParser`.
Differs from vLLM: arguments that are not a JSON object are malformed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from perturn.episodes.calls.call import CallFormat, Found, ToolCall, Tools
from perturn.episodes.calls.objects import calls_of, dump, make_call, together
from perturn.io.call_arguments import read_json, skip_space

_OPEN = "[TOOL_CALLS]"
_NAMED = re.compile(r"([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*[^\s\[{]+\s*)?(?:\[ARGS\]\s*)?(?=\{)")

_MORE = re.compile(r"\s*(?:\{|\[(?!TOOL_CALLS\])|[^\s\[\]{}]+\s*\[(?:CALL_ID|ARGS)\])")
"""Beginning of another call that lacks its mark."""


def _read(text: str, at: int, tools: Tools) -> Found | None:
    """Return the calls of a JSON list, or one call whose name stands before its arguments."""
    at = skip_space(text, at + len(_OPEN))
    named = _NAMED.match(text, at)
    found = read_json(text, named.end() if named else at)
    if found is None or _MORE.match(text, found[1]):
        return None
    calls = together([make_call(named[1], found[0])]) if named else calls_of(found[0])
    return Found(found[1], calls) if calls else None


def _write(calls: Sequence[ToolCall]) -> str:
    return "".join(f"{_OPEN}{call.name}[ARGS]{dump(dict(call.arguments))}" for call in calls)


MISTRAL = CallFormat(
    models="Mistral 7B v0.3, Nemo, Large, Small; Ministral, Magistral, Devstral",
    opens=r"\[TOOL_CALLS\]",
    read=_read,
    write=_write,
    marks=(_OPEN,),
    tokens=("[ARGS]", "[CALL_ID]"),
)
