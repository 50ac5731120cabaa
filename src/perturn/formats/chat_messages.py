"""Convert messages of public chat formats to Perturn's format. No other module knows the keys of public formats.

The module knows the keys of TRL, OpenAI (chat and fine-tuning), axolotl, ms-swift, LLaMA-Factory and ShareGPT, and of
servers of the chat-completions protocol. It reads rows of data sets, answers of servers, and imported episodes. In
Perturn's format, every content is text, and the arguments of a tool call are an object. The reasoning of an assistant
message is under `reasoning_content`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, NoReturn

from perturn.data.content_parts import Said, flatten, flatten_said, tool_text
from perturn.errors import DataError, did_you_mean
from perturn.io.call_arguments import ARGUMENTS, read_arguments
from perturn.io.plain_data import holds, mismatch
from perturn.io.read_input import parse_json
from perturn.types import Action, Message

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys that may hold the reasoning of an assistant message."""

_ROLES = ("assistant", "developer", "system", "tool", "user")
_ALIASES = {
    **dict.fromkeys(("human",), "user"),
    **dict.fromkeys(("gpt", "model", "chatgpt", "bing", "bard", "bot"), "assistant"),
    **dict.fromkeys(("function", "function_response", "ipython", "observation", "tool_response"), "tool"),
}
CALL_ROLES = ("function_call", "tool_call")
"""Roles of LLaMA-Factory and ms-swift for messages whose content is the JSON text of tool calls."""

_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
"""Pattern of reasoning in front of the JSON text of tool calls."""

_MARKS = ("weight", "train", "training", "trainable", "loss", "loss_mask", "loss_scale")
"""Keys of OpenAI, axolotl, ms-swift and other trainers that say whether a message carries loss."""
_SPANS = ("train_detail", "training_detail", "reasoning_train_detail", "reasoning_training_detail")
"""Keys of axolotl that let only parts of a message carry loss."""
_MEDIA = ("audio", "audios", "image", "images", "video", "videos")
_COMMON = {"role", "content", "from", "value", "id", "name", "tool_call_id", *_MARKS, *_SPANS, *_MEDIA}
_DEFAULTS = {"prefix": False, "partial": False, "is_error": False}
"""Ignored keys, each with its default. A key that holds its default is not reported as ignored."""
_OF_ASSISTANT = {"tool_calls", "function_call", "refusal", "reasoning_details", "ended", *REASONING}


@dataclass(frozen=True)
class Read:
    """A message in Perturn's format."""

    message: Message
    trained: bool = True
    """Whether an assistant message carries loss, by the keys of the message."""
    ended: bool = True
    """Whether an assistant message is whole. False: it was cut at a token limit."""
    is_call: bool = False
    """Whether the message came separately and holds tool calls of the assistant message before it."""


def read_messages(value: Any, where: str, unread: set[str]) -> list[Read]:
    """Return the messages of a conversation in Perturn's format.

    Args:
        value: A list of messages.
        where: Location of the conversation, for error messages.
        unread: Set that receives the ignored keys, except keys that hold their defaults.

    Raises:
        DataError: If a message cannot be read, or asks for an unsupported kind of training.
    """
    if isinstance(value, str):
        raise DataError(
            f"{where}: expected messages, got text. "
            'Wrap it: [{"role": "user", "content": ...}], or role assistant for what carries loss.'
        )
    if not isinstance(value, list):
        _fail(where, "a list of messages", value)
    found: list[Read] = []
    for index, message in enumerate(value):
        one = _read(message, f"{where}[{index}]", unread)
        before = found[-1] if found else None
        if one.is_call and before and (before.is_call or _only_says(before.message)):
            found[-1] = _joined(before, one, f"{where}[{index}]")
        else:
            found.append(one)
    return found


def with_role(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with the keys `role` and `content`, and its role as chat templates know it.

    Any other role is unchanged.
    """
    given = dict(message)
    for ours, theirs in (("role", "from"), ("content", "value")):
        if theirs in given and ours not in given:
            given[ours] = given.pop(theirs)
    if "role" in given:
        said = str(given["role"]).strip().lower().replace("-", "_")
        given["role"] = _ALIASES.get(said, said if said in (*_ROLES, *CALL_ROLES) else given["role"])
    return given


def read_answer(message: Mapping[str, Any], where: str) -> Action:
    """Return a server's answer as an action. Arguments of a tool call that are no JSON object are kept as text.

    Raises:
        DataError: If the content or a tool call has an unknown form.
    """
    given = {key: value for key, value in message.items() if value is not None}
    said = _said(given, where)
    thoughts = (given[key] for key in REASONING if isinstance(given.get(key), str) and given[key])
    reasoning = next(thoughts, said.reasoning)
    calls = tuple(_calls(given, where, tolerant=True))
    return Action(said.text, tool_calls=calls, reasoning=reasoning, ended=given.get("ended") is not False)


def _read(message: Any, where: str, unread: set[str]) -> Read:
    """Return one message in Perturn's format."""
    if not isinstance(message, Mapping):
        _fail(where, "a message object", message)
    given = with_role({str(key): value for key, value in message.items() if value is not None})
    if "role" not in given:
        _fail(where, "a message with a role", message)
    role = given["role"]
    if role not in (*_ROLES, *CALL_ROLES):
        raise DataError(f"{where}.role: unknown role {role!r:.200}.{did_you_mean(str(role), _ROLES)}")
    for key in (each for each in _MEDIA if given.get(each)):
        raise DataError(f"{where}.{key}: images, sound and the like are not supported. Drop the row.")
    if role == "assistant" or role in CALL_ROLES:
        return _read_said(given, role, where, unread)
    trained = is_trained(given, where)
    if trained and any(given.get(mark) for mark in _MARKS):
        unread.add("a mark that asks for loss on a message of another than the assistant")
    unread |= _unknown(given, _COMMON)
    content = given.get("content", "")
    content = (
        tool_text(content, f"{where}.content") if role == "tool" else flatten(content, f"{where}.content")
    )
    if not isinstance(content, str):
        _fail(f"{where}.content", "text", content)
    return Read({**_without(given, {*_MARKS, *_MEDIA}), "role": role, "content": content})


def _read_said(given: dict[str, Any], role: str, where: str, unread: set[str]) -> Read:
    """Read an assistant message, or a separate message that holds its tool calls."""
    trained, ended = is_trained(given, where), given.get("ended") is not False
    unread |= _unknown(given, _COMMON | _OF_ASSISTANT)
    if role in CALL_ROLES:
        content, thought = given.get("content"), ""
        if isinstance(content, str) and (found := _THOUGHT.match(content)):
            content, thought = content[found.end() :], found[1].strip()
        calls = _calls_of_text(content, f"{where}.content", unread)
        action = Action("", tool_calls=tuple(calls), reasoning=thought)
        return Read(action.message(), trained, ended, is_call=True)
    said = _said(given, where)
    calls = _calls(given, where, unread=unread)
    action = Action(said.text, tool_calls=tuple(calls), reasoning=_reasoning(given, said, where))
    return Read(action.message(), trained, ended)


def _said(given: Mapping[str, Any], where: str) -> Said:
    """Return the text and the reasoning in the content. If the content has no text, a refusal is the text."""
    content = flatten_said(given.get("content", ""), f"{where}.content")
    said = content if isinstance(content, Said) else Said(content)
    if not isinstance(said.text, str):
        _fail(f"{where}.content", "text", said.text)
    refusal = given.get("refusal")
    return said if said.text or not isinstance(refusal, str) else Said(refusal, said.reasoning)


def _reasoning(given: Mapping[str, Any], said: Said, where: str) -> str:
    """Return the reasoning of a message, from its own key or from the parts of its content."""
    found = {key: given[key] for key in REASONING if given.get(key)}
    for key, value in found.items():
        if not isinstance(value, str):
            _fail(f"{where}.{key}", "text", value)
    thoughts = {text.strip() for text in (*found.values(), said.reasoning) if text.strip()}
    if len(thoughts) > 1:
        raise DataError(
            f"{where}: holds two different thoughts, in {', '.join(found)}"
            f"{' and in content' if said.reasoning else ''}. Keep one of them."
        )
    if given.get("reasoning_details") and not thoughts:
        raise DataError(f"{where}.reasoning_details: write the thought as text into reasoning_content.")
    return next(iter(found.values()), said.reasoning)


def is_trained(given: Mapping[str, Any], where: str) -> bool:
    """Return whether a message carries loss, by the keys that decide about loss.

    Raises:
        DataError: If the keys disagree, or give a weight other than 0 or 1.
    """
    for key in (each for each in _SPANS if given.get(each)):
        raise DataError(
            f"{where}.{key}: a turn carries loss as a whole or not at all. Mark the message with train, true or false."
        )
    said = {key: given[key] for key in _MARKS if given.get(key) is not None}
    for key, value in said.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise DataError(
                f"{where}.{key}: {mismatch('0 or 1, false or true', value)}. A turn carries loss as a whole or not at "
                "all; give other weights as WeightedTrajectory."
            )
    if len(set(map(bool, said.values()))) > 1:
        raise DataError(f"{where}: {' and '.join(f'{k}={v}' for k, v in said.items())} disagree. Keep one.")
    return all(said.values())


def _calls(
    given: Mapping[str, Any], where: str, *, unread: set[str] | None = None, tolerant: bool = False
) -> list[dict[str, Any]]:
    """Return the tool calls of an assistant message, from `tool_calls` or the older `function_call`."""
    calls = given.get("tool_calls", [])
    calls = [] if calls == "" else calls
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        _fail(f"{where}.tool_calls", "a list of objects", calls)
    found = [
        _call(call, f"{where}.tool_calls[{index}]", unread, tolerant=tolerant)
        for index, call in enumerate(calls)
    ]
    if not (older := given.get("function_call")):
        return found
    if not isinstance(older, Mapping):
        _fail(f"{where}.function_call", "a call with the name of its function", older)
    call = _call(older, f"{where}.function_call", unread, tolerant=tolerant)
    if found and not tolerant and [each["function"] for each in found] != [call["function"]]:
        raise DataError(f"{where}.function_call: differs from tool_calls. Keep one of them.")
    return found or [call]


def _calls_of_text(content: Any, where: str, unread: set[str]) -> list[dict[str, Any]]:
    """Return the tool calls of a separate message. Its content is the JSON text of a call or of a list of calls."""
    if isinstance(content, str):
        content = parse_json(content, where, DataError, "Give the call as JSON: its name and arguments.")
    calls = content if isinstance(content, list) else [content]
    if not calls or not all(isinstance(call, Mapping) for call in calls):
        _fail(where, "the JSON text of a call or of a list of calls", content)
    return [_call(call, f"{where}[{index}]", unread) for index, call in enumerate(calls)]


def _call(
    call: Mapping[str, Any], where: str, unread: set[str] | None, *, tolerant: bool = False
) -> dict[str, Any]:
    """Return a tool call in the format of chat templates."""
    given = {key: value for key, value in call.items() if value is not None}
    function = given.get("function", given)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        if tolerant:
            return given
        _fail(where, "a call with the name of its function", call)
    keys = [key for key in ARGUMENTS if function.get(key) is not None]
    if not tolerant and not any(key in function for key in ARGUMENTS):
        raise DataError(f"{where}: expected arguments, got none. Write {{}} for a call without arguments.")
    given_as = {key: read_arguments(function[key]) for key in keys}
    for key, arguments in given_as.items():
        if arguments is None and not tolerant:
            raise DataError(
                f"{where}.{key}: {mismatch('an object, or its JSON text', function[key])}. Correct it."
            )
    if any(each is None or each != given_as[keys[0]] for each in given_as.values()):
        if not tolerant:
            raise DataError(f"{where}: {' and '.join(keys)} differ. Keep one of them.")
        arguments = {key: _as_text(function[key]) if each is None else each for key, each in given_as.items()}
    else:
        arguments = {"arguments": given_as[keys[0]] if keys else {}}
    if unread is not None:
        extra = given.keys() - {"id", "type", "function", "index", "name", *ARGUMENTS}
        unread |= {f"tool_calls: {each}" for each in extra if holds(given[each])}
    held = {"id": given["id"]} if given.get("id") else {}
    return {**held, "type": "function", "function": {"name": function["name"], **arguments}}


def _as_text(arguments: Any) -> str:
    """Return the arguments of a server's tool call as text, if they are no JSON object."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _only_says(message: Message) -> bool:
    """Return whether a message is an assistant message without tool calls, which may follow separately."""
    return message["role"] == "assistant" and "tool_calls" not in message


def _joined(before: Read, call: Read, where: str) -> Read:
    """Return an assistant message together with the tool calls of the message after it."""
    if before.trained != call.trained:
        raise DataError(
            f"{where}: the call and the message before it are one turn, and only one of them carries loss. Mark both."
        )
    calls = [*before.message.get("tool_calls", ()), *call.message["tool_calls"]]
    thoughts = list(filter(None, (each.message.get("reasoning_content") for each in (before, call))))
    thought = {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    message = {**before.message, **thought, "tool_calls": calls}
    return Read(message, before.trained, before.ended and call.ended, is_call=True)


def _unknown(given: Mapping[str, Any], known: Set[str]) -> set[str]:
    """Return the ignored keys of a message whose values differ from their defaults."""
    return {
        key
        for key, value in given.items()
        if key not in known and holds(value) and not (key in _DEFAULTS and value == _DEFAULTS[key])
    }


def _without(given: Mapping[str, Any], keys: Set[str]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key not in keys}


def _fail(where: str, expected: str, value: object) -> NoReturn:
    raise DataError(f"{where}: {mismatch(expected, value)}. Correct the value.")
