"""Tests whether a chat template shows tools, and writes calls that Perturn can parse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perturn.chat.rendering import ChatTemplate
from perturn.episodes.calls import CALL_FORMATS
from perturn.episodes.tool_calls import ToolCall, chat_call, parse_text
from perturn.errors import ModelError
from perturn.types import Message

_CALL = ToolCall("find_lamp", {"room": "hall", "count": 2})
_TYPES = {"room": {"type": "string"}, "count": {"type": "integer"}}
_FUNCTION = {"name": _CALL.name, "description": "", "parameters": {"type": "object", "properties": _TYPES}}
_TOOLS = [{"type": "function", "function": _FUNCTION}]


def tool_fault(chat: ChatTemplate, decode: Callable[[Sequence[int]], str]) -> str | None:
    """Return why a policy with this template cannot use tools; None if it can.

    Calls have no ids here, as in an episode.

    Args:
        chat: The chat template.
        decode: Function from sampled token ids to text, with the marks of calls.
    """
    asked: list[Message] = [{"role": "user", "content": "a"}]
    wrote: Message = {"role": "assistant", "content": "", "tool_calls": [chat_call(_CALL)]}
    name = f"the chat template of {chat.tokenizer.name_or_path!r}"
    try:
        opened = chat.render(asked, _TOOLS, generate=True)
        if _CALL.name not in opened:
            return f"{name} shows no tools"
        written = chat.added(opened, chat.render([*asked, wrote], _TOOLS), "an assistant message")
    except ModelError as error:
        return str(error).rstrip(".")
    read = parse_text(decode(chat.tokenize(chat.before_end(written, wrote)[0])), _TOOLS)
    if read is None or read.calls != (_CALL,):
        return f"{name} writes calls in none of the known formats ({', '.join(CALL_FORMATS)})"
    return None


def check_shown(chat: ChatTemplate, asked: Sequence[Message], tools: Sequence[Any]) -> None:
    """Check that a prompt differs from the same prompt without the tools: else a policy would not know them.

    Args:
        chat: The chat template.
        asked: Messages up to the first answer.
        tools: Schemas of the tools that are offered.

    Raises:
        ModelError: If the template shows no tools.
    """
    if tools and chat.try_render(asked, (), generate=True) == chat.render(asked, tools, generate=True):
        function = tools[0].get("function")
        name = (function if isinstance(function, Mapping) else tools[0]).get("name")
        raise ModelError(
            f"the chat template shows no tools, but {name!r} is offered. Leave the tools out, or give a template that "
            f"shows them {chat.for_tools}"
        )
