"""Thoughts of assistant messages, as a chat template writes them.

A thought is a field of its own in our messages (`reasoning_content`), or the beginning of the content between `<think>`
tags. A chat template may read the field under another name, may not read it at all, and may open every answer with an
empty thought, which a thought in the content would follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perturn.errors import DataError
from perturn.formats.chat_messages import REASONING
from perturn.io.call_arguments import read_arguments
from perturn.types import Message

_OPEN, _CLOSE = "<think>", "</think>"
_PROBE = "\u2063thought\u2063"


@dataclass(frozen=True)
class Thoughts:
    """The way in which a chat template writes thoughts."""

    key: str | None
    """Key of a message under which it reads a thought; None: it reads none."""
    adds: bool
    """Whether it opens an answer with an empty thought, even where the content has one."""

    def shown(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with thoughts where the template reads them, and arguments of calls as objects.

        Raises:
            DataError: If a message has a thought as a field, and the template reads none, or two different thoughts.
        """
        return [self._shown(each) if each["role"] == "assistant" else each for each in messages]

    def _shown(self, message: Message) -> Message:
        message = _with_objects(message) if message.get("tool_calls") else message
        if message.get("reasoning_content") or (self.adds and self.key is not None):
            message = _divided(message)
        if not (thought := message.get("reasoning_content")) or self.key == "reasoning_content":
            return message
        if self.key is None:
            raise DataError(
                f"an assistant message has its thought as a field ({thought[:40]!r}), which the chat template does not "
                "write. Move the thought into content as the template's model writes it, such as between "
                f"{_OPEN} and {_CLOSE}; drop it; or give a template that reads reasoning_content with `chat_template`."
            )
        rest = {key: value for key, value in message.items() if key != "reasoning_content"}
        return {**rest, self.key: thought}

    def refuse_second(self, text: str, where: str) -> None:
        """Refuse a content that begins with a thought where the template would write an empty one before it.

        Raises:
            DataError: If the template has no field that the thought could be moved to.
        """
        if self.adds and self.key is None and has_thought(text):
            raise DataError(
                f"{where}: the content begins with a thought, and the chat template opens each answer with an empty "
                "one, so two would be learnt. Drop the thought, or give another template with `chat_template`."
            )


def find_thoughts(render: Callable[[list[Message]], str | None]) -> Thoughts:
    """Try what a chat template does with thoughts.

    Args:
        render: The text of a conversation as the template writes it; None where it refuses.
    """
    asked: Message = {"role": "user", "content": "a"}

    def says(content: str, **more: str) -> str:
        return render([asked, {"role": "assistant", "content": content, **more}]) or ""

    key = next((key for key in REASONING if _PROBE in says("b", **{key: _PROBE})), None)
    before, without = (render([asked]) or "").count(_CLOSE), says("b").count(_CLOSE)
    within = says(f"{_OPEN}\n{_PROBE}\n{_CLOSE}\n\nb").count(_CLOSE)
    return Thoughts(key, adds=within > without > before)


def has_thought(text: str) -> bool:
    """Whether a content begins with a thought, whose opening tag may stand in the prompt."""
    thought, closed, _ = text.partition(_CLOSE)
    return bool(closed) and (thought.lstrip().startswith(_OPEN) or _OPEN not in thought)


def _divided(message: Message) -> Message:
    """The message with the thought of its content as a field; one that the field holds too is written once."""
    content, field = message.get("content"), message.get("reasoning_content")
    if not isinstance(content, str) or not has_thought(content):
        return message
    thought, _, rest = content.partition(_CLOSE)
    thought = thought.lstrip().removeprefix(_OPEN).strip("\n")
    if field and thought.strip() not in ("", field.strip()):
        raise DataError(
            f"an assistant message holds two different thoughts, {thought[:40]!r} in its content and {field[:40]!r} in "
            "its field. Keep one of them."
        )
    return {**message, "content": rest.lstrip("\n"), "reasoning_content": field or thought}


def _with_objects(message: Message) -> Message:
    """The message with arguments of its calls as objects, where they came as JSON text."""
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        text = function.get("arguments")
        if isinstance(text, str) and (arguments := read_arguments(text)) is not None:
            function = {**function, "arguments": arguments}
            call = {**call, "function": function} if "function" in call else function
        calls.append(call)
    return {**message, "tool_calls": calls}
