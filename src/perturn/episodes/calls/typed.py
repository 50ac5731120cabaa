"""Convert arguments that are written as text between tags to values, by the types in the tool's schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perturn.episodes.calls.call import Tools
from perturn.io.call_arguments import read_json, skip_space

_TEXTS = ("string", "str", "text", "varchar", "char", "enum")
_PYTHON = {"True": True, "False": False, "None": None}
"""Values that Qwen's chat templates write in Python's form instead of JSON's."""


def typed(text: str, tool: str, parameter: str, tools: Tools) -> Any:
    """Return the value of an argument that is written as text.

    If the schema allows a text, the value is the unchanged text. Otherwise the text is read as JSON, or as Python's
    `True`, `False` or `None`. A text that is neither stays a text, which the tool may reject.

    Source: vLLM's `Qwen3CoderToolParser`.
    Differs: vLLM reads a boolean as false for any text but `true`, and an undeclared parameter as text.

    Args:
        text: The text between the tags.
        tool: Name of the called tool.
        parameter: Name of the argument.
        tools: Schemas of the offered tools.
    """
    types = _types(_schema(tool, parameter, tools))
    empty = text.strip() in ("null", "None") and "null" in types
    if types & set(_TEXTS) and not empty:
        return text
    if text.strip() in _PYTHON:
        return _PYTHON[text.strip()]
    found = read_json(text, 0)
    return text if found is None or skip_space(text, found[1]) < len(text) else found[0]


def _schema(tool: str, parameter: str, tools: Tools) -> Mapping[str, Any]:
    """Return the schema of a parameter; empty if no schema declares it."""
    for each in tools:
        function = _mapping(each.get("function", each))
        if function.get("name") == tool:
            parameters = _mapping(function.get("parameters"))
            return _mapping(_mapping(parameters.get("properties")).get(parameter))
    return {}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema allows: its `type`, the types of its alternatives, or the type of its choices."""
    declared = schema.get("type")
    if declared is not None:
        return {str(each).lower() for each in (declared if isinstance(declared, list) else [declared])}
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list):
        return set().union(*(_types(_mapping(each)) for each in options))
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    texts = isinstance(choices, list) and choices and all(isinstance(each, str) for each in choices)
    return {"string"} if texts else set()
