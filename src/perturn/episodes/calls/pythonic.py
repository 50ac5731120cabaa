"""LFM2: a list of calls in Python syntax, `<|tool_call_start|>[NAME(key="text", count=2)]<|tool_call_end|>`.

Values are Python literals. `true`, `false` and `null` are read too, since chat templates write objects as JSON. LFM2
writes a list of JSON calls between the marks if the prompt asks for it; this list is read too.

Source: chat templates of LFM2 and LFM2.5; vLLM's `PythonicToolParser`.
Differs from vLLM: a set, bytes, arguments without names, a key given twice, and an unknown escape are malformed. So are
names that are not valid in Python, such as `look-up`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

from perturn.episodes.calls.call import CallFormat, Found, ToolCall, Tools
from perturn.episodes.calls.objects import calls_of, closed, make_call, together
from perturn.io.call_arguments import read_json, unique

_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_JSON = re.compile(r"\s*\[?\s*\{")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = frozenset("\\'\"\nabfnrtvxNuU0")
"""Characters that may follow a backslash in a text. For other characters, Python only warns."""
_WORDS = {"true": True, "false": False, "null": None}
_MOST = 16
"""Largest number of closing marks to try, since the text of an argument may hold closing marks."""


def _read(text: str, at: int, tools: Tools) -> Found | None:
    at += len(_OPEN)
    if _JSON.match(text, at):
        found = read_json(text, at)
        made, end = (calls_of(found[0]), closed(text, found[1], _CLOSE)) if found else (None, None)
        return None if made is None or end is None else Found(end, made)
    for stop, end in _ends(text, at):
        if (tree := _parsed(text[at:stop])) is not None:
            made = _calls(tree)
            return None if made is None else Found(end, made)
    return None


def _ends(text: str, at: int) -> Iterator[tuple[int, int]]:
    """Yield positions where the calls may end, each with the position where the text then continues."""
    for _ in range(_MOST):
        at = text.find(_CLOSE, at)
        if at < 0:
            yield len(text), len(text)
            return
        yield at, at + len(_CLOSE)
        at += len(_CLOSE)


def _parsed(text: str) -> ast.expr | None:
    """Return the parsed expression of a text; None if it is not an expression."""
    if not _ESCAPES.issuperset(_ESCAPE.findall(text)):
        return None
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _calls(tree: ast.expr) -> tuple[ToolCall, ...] | None:
    try:
        return together(map(_call, tree.elts)) if isinstance(tree, ast.List) else None
    except (ValueError, RecursionError):
        return None


def _call(node: ast.expr) -> ToolCall | None:
    if not isinstance(node, ast.Call) or node.args:
        return None
    return make_call(_name(node.func), unique((_key(each.arg), _value(each.value)) for each in node.keywords))


def _name(node: ast.expr) -> str:
    """Return the name of a function, which may have dots."""
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if not isinstance(node, ast.Name):
        raise ValueError("no name")
    return node.id


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise ValueError("an argument without a name")
    return key


def _value(node: ast.expr | None) -> Any:
    """Return the value of a literal.

    Raises:
        ValueError: If the node is not a literal.
    """
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str | int | float)):
        return node.value
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _value(node.operand)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_key(_value(key)) for key in node.keys]
        return unique(zip(keys, map(_value, node.values), strict=True))
    raise ValueError("no literal")


def _write(calls: Sequence[ToolCall]) -> str:
    return f"{_OPEN}[{', '.join(map(_written, calls))}]{_CLOSE}"


def _written(call: ToolCall) -> str:
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"


PYTHONIC = CallFormat(
    models="LFM2, LFM2.5",
    opens=r"<\|tool_call_start\|>",
    read=_read,
    write=_write,
    marks=(_OPEN, _CLOSE),
)
