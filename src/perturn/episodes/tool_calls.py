"""Native tool calls: parsed from the policy's text, sent to the world, and their results in the policy's prompt.

An environment with tools (`Observation.tools`) receives each action as the JSON text of `write_action`, so it need not
know how a model's chat template writes calls. Calls in text are read in every format of `CALL_FORMATS`.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from perturn.episodes.calls.call import ToolCall as ToolCall
from perturn.episodes.calls.call import Tools
from perturn.episodes.calls.find_calls import read_answer, write_calls
from perturn.episodes.calls.objects import call_of, together
from perturn.io.call_arguments import ARGUMENTS
from perturn.io.plain_data import mended
from perturn.types import Action, Message

NO_CALL = ToolCall("")
"""The call of a malformed action, where calls are compared; no tool has its name."""


@dataclass(frozen=True)
class ToolAction:
    """One turn of a policy that has tools: calls, or a message to the user where there are none."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


def write_action(action: ToolAction) -> str:
    """Return the action as a world gets it in `step`: JSON with `text` and `calls`."""
    return json.dumps(
        {"text": action.text, "calls": [_plain(call) for call in action.calls]}, ensure_ascii=False
    )


def read_action(action: str) -> ToolAction | None:
    """Return the action that `write_action` wrote as this text; None if the text is not such JSON.

    A call alone, or a list of calls, is read as well: `{"name": ..., "arguments": {...}}`, or as in chat templates. So
    an expert may write a call as short as that.
    """
    try:
        data = json.loads(action)
    except (ValueError, RecursionError):
        return None
    return read_said(data)


def read_said(data: Any) -> ToolAction | None:
    """Return the action that the JSON of `read_action` holds; None for anything else."""
    if isinstance(data, list):
        data = {"calls": data} if data and all(map(_is_call, data)) else None
    elif _is_call(data):
        data = {"calls": [data]}
    if not isinstance(data, Mapping) or not {"calls"} <= data.keys() <= {"text", "calls"}:
        return None
    text = data.get("text", "")
    calls = _calls(data["calls"] if isinstance(data["calls"], list) else [None])
    return None if calls is None or not isinstance(text, str) else ToolAction(text, calls)


def _is_call(data: Any) -> bool:
    """Return whether an object is a call and nothing else: it names arguments, or is in the form of chat templates."""
    if not isinstance(data, Mapping):
        return False
    return isinstance(data.get("function"), Mapping) or (
        "name" in data and not data.keys().isdisjoint(ARGUMENTS)
    )


def understand(action: Action, tools: Tools = ()) -> tuple[Action, ToolAction | None]:
    """Take the calls out of an action's text, unless its engine has done so.

    Args:
        action: As an engine gave it.
        tools: Schemas of the tools that are offered, which type arguments that a model writes as text.

    Returns: The action with its calls, and its text; (an action of text alone, None) if it is malformed or empty.
    """
    if action.tool_calls:
        calls = _calls(action.tool_calls)
        if calls is None:
            return as_text(action), None
        made = tuple(map(_with_object, action.tool_calls, calls))
        return replace(action, tool_calls=made), ToolAction(action.text, calls)
    read = read_answer(action.text, tools)
    made = tuple(map(chat_call, read.calls))
    if made or read.said != action.text.strip():  # thoughts may stand between other marks now
        action = replace(action, text=read.said, tool_calls=made)
    if read.malformed or not (made or read.said):
        return action, None
    return action, ToolAction(read.said, tuple(read.calls))


def as_text(action: Action) -> Action:
    """Return an action whose calls mean nothing, as text alone: valid Unicode, however strange it was."""
    text = action.text
    if action.tool_calls:
        try:
            written = json.dumps([dict(call) for call in action.tool_calls], ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):  # what no JSON holds, or hardly any reader reads
            written = reprlib.repr(action.tool_calls)
        text = f"{text}\n{written}".lstrip()
    return replace(action, text=mended(text), tool_calls=())


def parse_text(text: str, tools: Tools = ()) -> ToolAction | None:
    """Turn the text of a turn into the action, with calls in any of `CALL_FORMATS`; None if malformed or empty.

    An action is malformed if a call in it cannot be executed exactly as it is written. A call that is only mentioned in
    a thought does not count. Words before, between and after calls are the text of the action.
    """
    return understand(Action(text), tools)[1]


def write_text(action: ToolAction, form: str = "hermes") -> str:
    """Return the action as text, with calls in a format of `CALL_FORMATS`, as `parse_text` reads it.

    Raises:
        DataError: If the format cannot write the calls.
    """
    return "\n".join(filter(None, (action.text, write_calls(action.calls, form))))


def expert_action(said: str) -> ToolAction:
    """Return the action that an expert wrote as JSON, as a model writes calls, or as a message to the user."""
    return read_action(said) or parse_text(said) or ToolAction(said)


def chat_call(call: ToolCall) -> dict[str, Any]:
    """Return the call in the form of chat templates."""
    return {"type": "function", "function": _plain(call)}


def _plain(call: ToolCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": dict(call.arguments)}


def result_messages(calls: Iterable[ToolCall], results: Iterable[str]) -> list[Message]:
    """Return results of calls as tool messages."""
    return [
        {"role": "tool", "name": call.name, "content": result}
        for call, result in zip(calls, results, strict=True)
    ]


def _calls(found: Iterable[Any]) -> tuple[ToolCall, ...] | None:
    """Return calls that an engine or a world has in a structure; None if one of them is unclear."""
    calls = list(found)
    return together(call_of(_known(call)) for call in calls) if calls else ()


def _known(call: Any) -> Any:
    """Name and arguments of a call. A server may add its own keys, such as an index."""
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping):
        return None
    return {key: value for key, value in function.items() if key in ("name", *ARGUMENTS)}


def _with_object(given: Mapping[str, Any], call: ToolCall) -> Mapping[str, Any]:
    """Return an engine's call with its arguments as an object, which a chat template writes once as JSON."""
    function = given.get("function", given)
    if function.get("arguments") == call.arguments:
        return given
    known = {key: value for key, value in function.items() if key not in ARGUMENTS}
    made = {**known, "arguments": dict(call.arguments)}
    return {**given, "function": made} if "function" in given else made


def call_similarity(call: ToolCall, gold: ToolCall) -> float:
    """Return the similarity of a call to a gold call, in [0, 1]: of name, parameter names and values.

        s = (1 + |K & K'| / |K | K'| + sum_(k in K') [v_k = v'_k]) / (2 + |K'|)   where the names are equal, else 0

    K and K' are the parameters that are given in the call and in the gold call; values are compared as in
    Python, so 1 equals 1.0, and True equals 1. Without any parameters |K & K'| / |K | K'| is 1.

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
