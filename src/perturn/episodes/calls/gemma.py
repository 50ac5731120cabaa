"""Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,count:2}<tool_call|>`, with keys without quotes.

Source: chat template of Gemma 4; vLLM's `Gemma4ToolParser`.
Differs from vLLM: an unquoted word that is not a number, true, false or null is malformed here; vLLM reads it as text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from perturn.episodes.calls.call import CallFormat, Found, ToolCall, Tools
from perturn.episodes.calls.objects import closed, dump, make_call
from perturn.io.call_arguments import read_json, skip_space, unique
from perturn.io.plain_data import DEEPEST

_OPEN, _CLOSE, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_CALL = re.compile(r"<\|tool_call>\s*call:\s*([^\s{<]+)\s*(?=\{)")
_KEY = re.compile(r"([^:{}\[\],<\"\n]+):")
_WORD = re.compile(r"[^\s,{}\[\]<:\"]+")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


def _read(text: str, at: int, tools: Tools) -> Found | None:
    begin = _CALL.match(text, at)
    if begin is None:
        return None
    try:
        arguments, end = _value(text, begin.end(), DEEPEST)
    except ValueError:
        return None
    call, after = make_call(begin[1], arguments), closed(text, end, _CLOSE, _OPEN)
    return None if call is None or after is None else Found(after, (call,))


def _value(text: str, at: int, levels: int) -> tuple[Any, int]:
    """Return the value that begins at `at`, and the position after it.

    Raises:
        ValueError: If no value begins there.
    """
    at = skip_space(text, at)
    if text.startswith(_QUOTE, at):
        end = text.index(_QUOTE, at + len(_QUOTE))
        return text[at + len(_QUOTE) : end], end + len(_QUOTE)
    if text.startswith(("{", "["), at):
        return _items(text, at, levels - 1)
    if not text.startswith('"', at) and (word := _WORD.match(text, at)) and word[0] in _WORDS:
        return _WORDS[word[0]], word.end()
    found = read_json(text, at)
    if found is None:
        raise ValueError(f"no value at {at}")
    return found


def _items(text: str, at: int, levels: int) -> tuple[Any, int]:
    """Return the object or list that begins at `at`, and the position after it."""
    if levels < 0:
        raise ValueError("nested too deep")
    keyed, close = text[at] == "{", "}" if text[at] == "{" else "]"
    items: list[Any] = []
    at = skip_space(text, at + 1)
    while not text.startswith(close, at):
        if items:
            if not text.startswith(",", at):
                raise ValueError(f"no comma at {at}")
            at += 1
        key = ""
        if keyed:
            key, at = _key(text, at, levels)
        value, at = _value(text, at, levels)
        items.append((key, value) if keyed else value)
        at = skip_space(text, at)
    return (unique(items) if keyed else items), at + 1


def _key(text: str, at: int, levels: int) -> tuple[str, int]:
    """Return the key that begins at `at`, with or without quotes, and the position of its value."""
    at = skip_space(text, at)
    if bare := _KEY.match(text, at):
        return bare[1].strip(), bare.end()
    key, at = _value(text, at, levels)
    at = skip_space(text, at)
    if not isinstance(key, str) or not text.startswith(":", at):
        raise ValueError(f"no key at {at}")
    return key, at + 1


def _write(calls: Sequence[ToolCall]) -> str:
    return "".join(f"{_OPEN}call:{call.name}{_written(dict(call.arguments))}{_CLOSE}" for call in calls)


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{_written_key(key)}:{_written(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, str):
        return f"{_QUOTE}{value}{_QUOTE}"
    return dump(value)


def _written_key(key: str) -> str:
    bare = _KEY.fullmatch(f"{key}:")
    return key if bare and key.strip() == key else _written(key)


GEMMA = CallFormat(
    models="Gemma 4",
    opens=r"<\|tool_call>",
    read=_read,
    write=_write,
    marks=(_OPEN, _CLOSE),
    tokens=(_QUOTE,),
)
