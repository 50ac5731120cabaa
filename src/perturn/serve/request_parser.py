"""Parse the conversations in requests.

A client sends its whole conversation with each request. Messages that were parsed in the last request are reused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perturn.episodes.prefix_matching import Position, Sequences, in_call_order, is_broken
from perturn.episodes.tool_calls import as_text
from perturn.errors import DataError
from perturn.formats.chat_messages import read_answer, read_messages
from perturn.io.plain_data import fault, is_unicode
from perturn.serve.exchange import Ask, Refusal
from perturn.types import Message

_KEYS = {
    "assistant": {"role", "content", "reasoning_content", "tool_calls"},
    "tool": {"role", "content", "name", "tool_call_id"},
}
"""Role -> keys of a message that are kept."""
_OTHERS = {"role", "content", "name"}
"""Keys of a message of any other role that are kept."""
_PLAIN = ("system", "user", "assistant")
"""Roles of messages that need no parsing if their only content is a text."""


class RequestParser:
    """Parser of one session's requests, which also finds the recorded turn that a request continues."""

    def __init__(self) -> None:
        self._ask: Ask | None = None
        self._messages: list[Message] = []
        self._position: Position | None = None
        self._known = 0

    def read(self, ask: Ask) -> None:
        """Parse the messages of a request.

        Raises:
            Refusal: If a message contains anything but text and tool calls.
        """
        known = self._common(ask.messages)
        try:
            fresh = read_conversation(ask.messages[known:], ask.param)
        except Refusal:
            read_conversation(ask.messages, ask.param)  # raises with the message's index in the whole request
            raise
        self._messages = [*self._messages[:known], *fresh]
        if self._ask is None or (self._ask.tools, self._ask.template_kwargs) != (
            ask.tools,
            ask.template_kwargs,
        ):
            self._position = None
        self._ask, self._known = ask, known

    def position(self, sequences: Sequences) -> Position:
        """Return which recorded turn the last parsed request continues."""
        assert self._ask is not None
        self._position = sequences.position(
            self._messages, self._ask.tools, self._ask.template_kwargs, self._position, self._known
        )
        return self._position

    def _common(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of leading messages that were parsed in the last request and can be reused.

        Parsing restarts at an assistant message, since tool results belong to the calls before them.
        """
        before = self._ask.messages if self._ask else ()
        if len(before) != len(self._messages):  # parsing has merged messages
            return 0
        pairs = enumerate(zip(before, messages, strict=False))
        alike = next((index for index, (old, new) in pairs if old != new), min(len(before), len(messages)))
        if alike < len(messages) and messages[alike].get("role") == "assistant":
            return alike
        while alike and messages[alike - 1].get("role") != "assistant":
            alike -= 1
        return max(alike - 1, 0)


def read_conversation(messages: Sequence[Mapping[str, Any]], param: str = "messages") -> list[Message]:
    """Parse the messages of a request.

    Raises:
        Refusal: If a message contains anything but text and tool calls.
    """
    if all(map(_is_plain, messages)):
        return [dict(message) for message in messages]
    try:
        given = [_with_broken_calls(each, f"{param}[{index}]") for index, each in enumerate(messages)]
        read = [each.message for each in read_messages(given, param, set())]
    except DataError as error:
        said = str(error).removesuffix(" Drop the row.")
        raise Refusal(400, said, "invalid_messages", param) from None
    if found := fault(read, param):
        raise Refusal(400, f"{found}.", "invalid_messages", param)
    plain = []
    for message in read:
        role = "system" if message["role"] == "developer" else message["role"]
        keys = _KEYS.get(role, _OTHERS)
        plain.append({key: value for key, value in message.items() if key in keys} | {"role": role})
    return in_call_order(plain)


def _with_broken_calls(message: Mapping[str, Any], where: str) -> Message:
    """Return a message. If a call cannot be read, all calls become text, as in answers.

    Raises:
        DataError: If the content or a call has an unknown form.
    """
    if message.get("role") == "assistant" and message.get("tool_calls"):
        action = read_answer(message, where)
        if is_broken(action):
            return as_text(action).message()
    return dict(message)


def _is_plain(message: Mapping[str, Any]) -> bool:
    """Return whether a message needs no parsing, since its only content is a text; this is the common case."""
    content = message.get("content")
    has_no_more = len(message) == 2 and message.get("role") in _PLAIN
    return has_no_more and isinstance(content, str) and is_unicode(content)


def continued(before: Sequence[Message], messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Append new messages to a conversation; a system message at their start replaces the conversation's own."""
    if messages and messages[0].get("role") == "system":
        later = before[1:] if before[0]["role"] == "system" else before
        return [messages[0], *later, *messages[1:]]
    return [*before, *messages]
