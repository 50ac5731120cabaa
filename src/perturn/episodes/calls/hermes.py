"""Hermes: JSON between tags, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Source: NousResearch's Hermes function-calling format; chat templates of Qwen2.5 and Qwen3.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from perturn.episodes.calls.call import CallFormat, Found, ToolCall, Tools
from perturn.episodes.calls.objects import calls_of, closed, dump
from perturn.io.call_arguments import read_json

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


_FENCE = re.compile(r"\s*```(?:json)?")


def _read(text: str, at: int, tools: Tools) -> Found | None:
    """Return the calls in a tag: one call, several in a row, or a list of calls, also in a code block."""
    fence = _FENCE.match(text, at + len(_OPEN))
    at = fence.end() if fence else at + len(_OPEN)
    calls: list[ToolCall] = []
    while found := read_json(text, at):
        value, at = found
        made = calls_of(value)
        if made is None:
            return None
        calls += made
        if fence and (end_of_block := _FENCE.match(text, at)):
            at = end_of_block.end()
        end = closed(text, at, _CLOSE, _OPEN)
        if end is not None:
            return Found(end, tuple(calls))
    return None


def _write(calls: Sequence[ToolCall]) -> str:
    written = (dump({"name": call.name, "arguments": dict(call.arguments)}) for call in calls)
    return "\n".join(f"{_OPEN}\n{each}\n{_CLOSE}" for each in written)


HERMES = CallFormat(
    models="Hermes 2 and 3, Qwen2.5, QwQ, Qwen3 (also 2507 and VL)",
    opens=r"<tool_call>(?=\s*(?:[{\[]|```))",
    read=_read,
    write=_write,
    marks=(_OPEN, _CLOSE),
)
