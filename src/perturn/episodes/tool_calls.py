"""Native tool calls: parse them from a policy's text, send them to the environment, put their results in the prompt.

An environment with tools (`Observation.tools`) receives each action as the JSON text of `write_action`, so it does not
depend on a model's chat template. Calls in a policy's text may have any format of `CALL_FORMATS`.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from perturn.data.origins import without_ids
from perturn.episodes.calls.call import ToolCall as ToolCall
from perturn.episodes.calls.call import Tools
from perturn.episodes.calls.find_calls import read_answer, write_calls
from perturn.episodes.calls.objects import call_of, together
from perturn.io.call_arguments import ARGUMENTS
from perturn.io.plain_data import mended
from perturn.types import Action, Message

NO_CALL = ToolCall("")
"""Placeholder for the call of a malformed action when calls are compared. No tool has its name."""


@dataclass(frozen=True)
class ToolAction:
    """Action of a policy that has tools: calls with optional text, or a message to the user if there are no calls."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


def write_action(action: ToolAction) -> str:
    """Return the action as JSON with `text` and `calls`, which the environment receives in `step`."""
    return json.dumps(
        {"text": action.text, "calls": [_plain(call) for call in action.calls]}, ensure_ascii=False
    )


def read_action(action: str) -> ToolAction | None:
    """Return the action from the JSON text of `write_action`; None if the text is not such JSON.

    The text may also be one call or a list of calls, as `{"name": ..., "arguments": {...}}` or in the form of chat
    templates. So an expert can write calls in this short form.
    """
    try:
        data = json.loads(action)
    except (ValueError, RecursionError):
        return None
    return read_said(data)


def read_said(data: Any) -> ToolAction | None:
    """Return the action from parsed JSON in a form of `read_action`; None for anything else."""
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
    """Return whether an object is one call: it has a name and arguments, or is in the form of chat templates."""
    if not isinstance(data, Mapping):
        return False
    return isinstance(data.get("function"), Mapping) or (
        "name" in data and not data.keys().isdisjoint(ARGUMENTS)
    )


def understand(action: Action, tools: Tools = ()) -> tuple[Action, ToolAction | None]:
    """Parse the tool calls in an action's text, unless the engine has done so.

    Args:
        action: The action as the engine returned it.
        tools: Schemas of the offered tools. They give the types of arguments that a model writes as text.

    Returns: The action with its calls, and its `ToolAction`. If the action is malformed or empty: the action without
    calls, and None.
    """
    if action.tool_calls:
        calls = _calls(action.tool_calls)
        if calls is None:
            return as_text(action), None
        made = tuple(map(_with_object, action.tool_calls, calls))
        return replace(action, tool_calls=made), ToolAction(action.text, calls)
    read = read_answer(action.text, tools)
    made = tuple(map(chat_call, read.calls))
    if made or read.said != action.text.strip():  # the thoughts' marks may have changed
        action = replace(action, text=read.said, tool_calls=made)
    if read.malformed or not (made or read.said):
        return action, None
    return action, ToolAction(read.said, tuple(read.calls))


def as_text(action: Action) -> Action:
    """Return an action with its unreadable calls turned into text, all of it valid Unicode and without ids of calls."""
    text = action.text
    if action.tool_calls:
        try:
            written = json.dumps(without_ids(map(dict, action.tool_calls)), ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):  # values that JSON cannot hold, or too deep nesting
            written = reprlib.repr(action.tool_calls)
        text = f"{text}\n{written}".lstrip()
    return replace(action, text=mended(text), tool_calls=())


def parse_text(text: str, tools: Tools = ()) -> ToolAction | None:
    """Parse the text of a turn into an action, with calls in any of `CALL_FORMATS`; None if malformed or empty.

    An action is malformed if a call in it cannot be executed exactly as it is written. A call inside a thought does not
    count. Words before, between and after calls become the text of the action.
    """
    return understand(Action(text), tools)[1]


def write_text(action: ToolAction, form: str = "hermes") -> str:
    """Return the action as text that `parse_text` reads, with calls in a format of `CALL_FORMATS`.

    Raises:
        DataError: If the format cannot write the calls.
    """
    return "\n".join(filter(None, (action.text, write_calls(action.calls, form))))


def expert_action(said: str) -> ToolAction:
    """Return the action that an expert wrote: as JSON, in a model's format of calls, or as a message to the user."""
    return read_action(said) or parse_text(said) or ToolAction(said)


def chat_call(call: ToolCall) -> dict[str, Any]:
    """Return a call in the form of chat templates."""
    return {"type": "function", "function": _plain(call)}


def _plain(call: ToolCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": dict(call.arguments)}


def result_messages(calls: Iterable[ToolCall], results: Iterable[str]) -> list[Message]:
    """Return the results of calls as tool messages."""
    return [
        {"role": "tool", "name": call.name, "content": result}
        for call, result in zip(calls, results, strict=True)
    ]


def _calls(found: Iterable[Any]) -> tuple[ToolCall, ...] | None:
    """Return calls from the structured data of an engine or environment; None if a call is ambiguous."""
    calls = list(found)
    return together(call_of(_known(call)) for call in calls) if calls else ()


def _known(call: Any) -> Any:
    """Return the name and arguments of a call, without other keys. A server may add keys, such as an index."""
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping):
        return None
    return {key: value for key, value in function.items() if key in ("name", *ARGUMENTS)}


def _with_object(given: Mapping[str, Any], call: ToolCall) -> Mapping[str, Any]:
    """Return an engine's call with its arguments as an object, so that a chat template does not encode them twice."""
    function = given.get("function", given)
    if function.get("arguments") == call.arguments:
        return given
    known = {key: value for key, value in function.items() if key not in ARGUMENTS}
    made = {**known, "arguments": dict(call.arguments)}
    return {**given, "function": made} if "function" in given else made


def call_similarity(call: ToolCall, gold: ToolCall) -> float:
    """Return the similarity of a call to a gold call, in [0, 1]: of name, parameter names and values.

        s = (1 + |K & K'| / |K | K'| + sum_(k in K') [v_k = v'_k]) / (2 + |K'|)   where the names are equal, else 0

    K and K' are the names of the arguments of the call and of the gold call. Values are compared as in Python, so 1
    equals 1.0, and True equals 1. If neither call has arguments, |K & K'| / |K | K'| is 1.

    Source: MatchTIR's code, `tool_similarity`.
    Differs: names are compared with case, since environments call tools by exact name. The code ignores case.
    """
    if call.name != gold.name:
        return 0.0
    given, wanted = call.arguments, gold.arguments
    every = given.keys() | wanted.keys()
    names = len(given.keys() & wanted.keys()) / len(every) if every else 1.0
    values = sum(bool(name in given and given[name] == value) for name, value in wanted.items())
    return (1 + names + values) / (2 + len(wanted))
