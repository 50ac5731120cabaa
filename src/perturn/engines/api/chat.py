"""Conversations in the form of the chat-completions protocol; its answers are read by `perturn.formats.chat_messages`.

The protocol wants an id on every tool call and on the message that answers it, and arguments as JSON text; the
library keeps calls in the form of chat templates, where both may be missing and arguments are an object. Thoughts are
left out: some servers refuse a request that holds them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from perturn.types import Message, Prompt


def to_chat(prompt: Prompt) -> list[Message]:
    """The conversation up to and with the newest observation, as the protocol takes it."""
    heard = [message for turn in prompt.turns for message in (*turn.observation, turn.action.message())]
    messages: list[Message] = []
    waiting: list[str] = []
    for index, message in enumerate([*prompt.messages, *heard, *prompt.observation]):
        written = {key: value for key, value in message.items() if key != "reasoning_content"}
        if written.get("tool_calls"):
            calls = [_call(call, f"call_{index}_{n}") for n, call in enumerate(written["tool_calls"])]
            written["tool_calls"] = calls
            waiting = [call["id"] for call in calls]
        elif written.get("role") == "tool" and waiting:  # results come in the order of the calls
            own = written.setdefault("tool_call_id", waiting[0])
            waiting = [each for each in waiting if each != own]
        messages.append(written)
    return messages


def _call(call: Mapping[str, Any], fallback: str) -> dict[str, Any]:
    """A call in the form of chat templates -> the protocol's."""
    function = dict(call.get("function", call))
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.get("id") or fallback,
        "type": "function",
        "function": {"name": function["name"], "arguments": text},
    }
