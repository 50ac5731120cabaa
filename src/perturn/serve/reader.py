"""Conversations of requests in our form.

A client sends its whole conversation with each request. What is known of it is not read again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perturn.episodes.sequences import Position, Sequences, in_call_order
from perturn.errors import DataError
from perturn.formats.chat_messages import read_messages
from perturn.io.plain_data import fault, is_unicode
from perturn.serve.exchange import Ask, Refusal
from perturn.types import Message

_KEYS = {
    "assistant": {"role", "content", "reasoning_content", "tool_calls"},
    "tool": {"role", "content", "name", "tool_call_id"},
}
"""Keys of a message that are read, by role."""
_OTHERS = {"role", "content", "name"}
_PLAIN = ("system", "user", "assistant")
"""Roles of messages that are in our form if they hold a text and nothing else."""


class Reader:
    """Reads the requests of one session, and finds their places among its turns."""

    def __init__(self) -> None:
        self._ask: Ask | None = None
        self._messages: list[Message] = []
        self._position: Position | None = None
        self._known = 0

    def read(self, ask: Ask) -> None:
        """Read the messages of a request.

        Raises:
            Refusal: If one holds something else than text and calls.
        """
        known = self._common(ask.messages)
        try:
            fresh = read_conversation(ask.messages[known:], ask.param)
        except Refusal:
            read_conversation(ask.messages, ask.param)  # names the message by its place in the whole
            raise
        self._messages = [*self._messages[:known], *fresh]
        if self._ask is None or (self._ask.tools, self._ask.template_kwargs) != (
            ask.tools,
            ask.template_kwargs,
        ):
            self._position = None
        self._ask, self._known = ask, known

    def position(self, sequences: Sequences) -> Position:
        """Find the place of the request that was read last."""
        assert self._ask is not None
        self._position = sequences.position(
            self._messages, self._ask.tools, self._ask.template_kwargs, self._position, self._known
        )
        return self._position

    def _common(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Return how many messages need no second reading: all before the last shared answer, or before a new one."""
        before = self._ask.messages if self._ask else ()
        if len(before) != len(self._messages):  # some were joined
            return 0
        pairs = enumerate(zip(before, messages, strict=False))
        alike = next((index for index, (old, new) in pairs if old != new), min(len(before), len(messages)))
        if alike < len(messages) and messages[alike].get("role") == "assistant":
            return alike
        while alike and messages[alike - 1].get("role") != "assistant":
            alike -= 1
        return max(alike - 1, 0)


def read_conversation(messages: Sequence[Mapping[str, Any]], param: str = "messages") -> list[Message]:
    """Read the messages of a request in our form.

    Raises:
        Refusal: If a message holds something else than text and calls.
    """
    if all(map(_is_plain, messages)):
        return [dict(message) for message in messages]
    try:
        read = [each.message for each in read_messages([dict(each) for each in messages], param, set())]
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


def _is_plain(message: Mapping[str, Any]) -> bool:
    """Return whether a message is in our form already, as most are: a text alone."""
    content = message.get("content")
    has_no_more = len(message) == 2 and message.get("role") in _PLAIN
    return has_no_more and isinstance(content, str) and is_unicode(content)


def continued(before: Sequence[Message], messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a conversation with new messages; a system text among them takes the place of the one before."""
    if messages and messages[0].get("role") == "system":
        later = before[1:] if before[0]["role"] == "system" else before
        return [messages[0], *later, *messages[1:]]
    return [*before, *messages]
