"""DeepSeek: calls between special tokens. The arguments are JSON, in R1 and V3 inside a code block.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

R1 and V3 write `function<｜tool▁sep｜>NAME` before the code block.

Source: chat templates of DeepSeek-R1, V3 and V3.1; vLLM's `DeepSeekV3ToolParser` and `DeepSeekV31ToolParser`.
Differs from vLLM: text between the special tokens that is not a call is malformed here; vLLM ignores it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from perturn.episodes.calls.call import CallFormat, Found, ToolCall, Tools
from perturn.episodes.calls.objects import closed, dump, make_call, together
from perturn.io.call_arguments import read_json, skip_space

_OPEN, _CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_CALL = re.compile(rf"\s*{_BEGIN}([^<\n]*){_SEPARATOR}")
_BLOCK = re.compile(r"([^<\n{]+)\n```(?:json)?\s*")
_BLOCK_END = re.compile(r"\s*```")


def _read(text: str, at: int, tools: Tools) -> Found | None:
    at += len(_OPEN) if text.startswith(_OPEN, at) else 0
    calls: list[ToolCall | None] = []
    while call := _CALL.match(text, at):
        name, at = call[1], call.end()
        if block := _BLOCK.match(text, at):
            if name.strip() != "function":
                return None
            name, at = block[1], block.end()
        found = read_json(text, at)
        if found is None:
            return None
        calls.append(make_call(name.strip(), found[0]))
        fence = _BLOCK_END.match(text, found[1]) if block else None
        end = closed(text, fence.end() if fence else found[1], _END, _CLOSE)
        if end is None:
            return None
        at = end
    made = together(calls)
    at = skip_space(text, at)
    if made is None or not (at == len(text) or text.startswith(_CLOSE, at)):
        return None
    return Found(min(at + len(_CLOSE), len(text)), made)


def _write(calls: Sequence[ToolCall]) -> str:
    written = (f"{_BEGIN}{call.name}{_SEPARATOR}{dump(dict(call.arguments))}{_END}" for call in calls)
    return f"{_OPEN}{''.join(written)}{_CLOSE}"


DEEPSEEK = CallFormat(
    models="DeepSeek-R1, V3 and V3.1",
    opens=f"{_OPEN}|{_BEGIN}",
    read=_read,
    write=_write,
    marks=(_OPEN, _CLOSE, _BEGIN, _END),
    tokens=(_SEPARATOR,),
)
