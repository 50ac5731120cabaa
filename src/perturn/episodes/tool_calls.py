"""Native tool calls: what a policy wrote -> calls, what a world is sent, and what the policy reads of the results.

A world that offers tools (`Observation.tools`) is sent each action as the JSON text of `write_action`, with which it
need not know how a model's chat template writes calls. Calls in text follow the convention of Hermes and Qwen, or are
nothing but JSON, as Llama and Mistral write them.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from perturn.io.plain import fault, mended
from perturn.types import Action, Message

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


NO_CALL = ToolCall("")
"""The call of a malformed action, where calls are compared; no tool has its name."""


@dataclass(frozen=True)
class ToolAction:
    """One turn of a policy that has tools: calls, or a message to the user where there are none."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


def write_action(action: ToolAction) -> str:
    """The action as a world gets it in `step`: JSON with `text` and `calls`."""
    return json.dumps(
        {"text": action.text, "calls": [_plain(call) for call in action.calls]}, ensure_ascii=False
    )


def read_action(action: str) -> ToolAction | None:
    """The action that `write_action` wrote as this text; None for any other text."""
    try:
        data = json.loads(action)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or data.keys() != {"text", "calls"} or not isinstance(data["text"], str):
        return None
    calls = _calls(data["calls"] if isinstance(data["calls"], list) else [None])
    return None if calls is None else ToolAction(data["text"], calls)


def understand(action: Action) -> tuple[Action, ToolAction | None]:
    """Take the calls out of an action's text, unless its engine has done so.

    Returns:
        The action with its calls, and what it says; (an action of text alone, None) where it is malformed or empty.
    """
    if action.tool_calls:
        calls = _calls(
            call.get("function", call) if isinstance(call, Mapping) else call for call in action.tool_calls
        )
        return (as_text(action), None) if calls is None else (action, ToolAction(action.text, calls))
    said = parse_text(action.text)
    if said is None or not said.calls:
        return action, said
    return replace(action, text=said.text, tool_calls=tuple(map(chat_call, said.calls))), said


def as_text(action: Action) -> Action:
    """An action whose calls mean nothing, as text alone: valid Unicode, however strange it was."""
    text = action.text
    if action.tool_calls:
        try:
            written = json.dumps([dict(call) for call in action.tool_calls], ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):  # what no JSON holds, or hardly any reader reads
            written = reprlib.repr(action.tool_calls)
        text = f"{text}\n{written}".lstrip()
    return replace(action, text=mended(text), tool_calls=())


def parse_text(text: str) -> ToolAction | None:
    """Text of a turn -> the action: text, then calls, each JSON between its tags; None where it is malformed.

    A text that is one call in JSON, or a list of calls, is these calls.
    """
    said, opened, rest = text.partition(_OPEN)
    if not opened:
        if calls := _bare_calls(text):
            return ToolAction("", calls)
        return ToolAction(text.strip()) if text.strip() and _CLOSE not in text else None
    found: list[Any] = []
    while opened:
        try:
            call, end = _DECODER.raw_decode(rest.lstrip())
        except (ValueError, RecursionError):
            return None
        found.append(call)
        between, closed, rest = rest.lstrip()[end:].partition(_CLOSE)
        if between.strip() or not closed:
            return None
        between, opened, rest = rest.partition(_OPEN)
        if between.strip():
            return None
    calls = _calls(found)
    return None if calls is None else ToolAction(said.strip(), calls)


def write_text(action: ToolAction) -> str:
    """The action as text, in the convention that `parse_text` reads."""
    calls = [f"{_OPEN}\n{json.dumps(_plain(call), ensure_ascii=False)}\n{_CLOSE}" for call in action.calls]
    return "\n".join([action.text] * bool(action.text) + calls)


def chat_call(call: ToolCall) -> dict[str, Any]:
    """The call in the form of chat templates."""
    return {"type": "function", "function": _plain(call)}


def _plain(call: ToolCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": dict(call.arguments)}


def result_messages(calls: Iterable[ToolCall], results: Iterable[str]) -> list[Message]:
    """Results of calls as tool messages."""
    return [
        {"role": "tool", "name": call.name, "content": result}
        for call, result in zip(calls, results, strict=True)
    ]


def _bare_calls(text: str) -> tuple[ToolCall, ...] | None:
    """Calls of a text that is nothing but their JSON, with `arguments` (Mistral) or `parameters` (Llama)."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    found = found if isinstance(found, list) else [found]
    if not all(isinstance(call, dict) and ("arguments" in call) != ("parameters" in call) for call in found):
        return None
    return _calls({**call, "arguments": call.get("arguments", call.get("parameters"))} for call in found)


def _calls(found: Iterable[Any]) -> tuple[ToolCall, ...] | None:
    """Calls with a name and an object of arguments, all plain data; None if one is anything else."""
    calls = []
    for call in found:
        given = call if isinstance(call, Mapping) else {}
        name, arguments = given.get("name"), given.get("arguments", {})
        if not (isinstance(name, str) and name and isinstance(arguments, Mapping)):
            return None
        if fault((name, arguments), "call"):
            return None
        calls.append(ToolCall(name, dict(arguments)))
    return tuple(calls)


def call_similarity(call: ToolCall, gold: ToolCall) -> float:
    """Similarity of a call to a gold call, in [0, 1]: of its name, of its parameters' names and of their values.

        s = (1 + |K & K'| / |K | K'| + sum_(k in K') [v_k = v'_k]) / (2 + |K'|)   where the names are equal, else 0

    K and K' are the parameters that are given in the call and in the gold call; values are equal as Python has it, so
    that 1 is 1.0, and True is 1. Without any parameters |K & K'| / |K | K'| is 1.

    Source: MatchTIR's code, `tool_similarity`.
    Differs: names must be equal as written, for so a world calls them; the code ignores case.
    """
    if call.name != gold.name:
        return 0.0
    given, wanted = call.arguments, gold.arguments
    every = given.keys() | wanted.keys()
    names = len(given.keys() & wanted.keys()) / len(every) if every else 1.0
    values = sum(bool(name in given and given[name] == value) for name, value in wanted.items())
    return (1 + names + values) / (2 + len(wanted))
