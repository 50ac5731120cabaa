"""Conversion of prompts to chat-completions messages, and validation of a server's answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from perturn.errors import DataError
from perturn.io.read_input import check_shape, parse_object
from perturn.types import Message, Prompt

Tokens = Annotated[int, Field(ge=0, le=10**9)]


class _Function(TypedDict):
    name: str


class _Call(TypedDict):
    function: NotRequired[_Function | None]


class _Message(TypedDict):
    content: NotRequired[str | list[dict[str, Any]] | None]
    refusal: NotRequired[str | None]
    tool_calls: NotRequired[list[_Call] | None]
    function_call: NotRequired[_Function | None]


class _Choice(TypedDict):
    message: _Message
    finish_reason: NotRequired[str | None]


class _Completion(TypedDict):
    choices: Annotated[list[_Choice], Field(min_length=1)]


class _Usage(TypedDict):
    prompt_tokens: Tokens
    completion_tokens: Tokens


def read_completion(body: bytes) -> dict[str, Any]:
    """Parse the answer of a server and check its choices; `read_usage` reads the token counts.

    Raises:
        DataError: If the answer is not a chat completion; the message names the first malformed value.
    """
    data = parse_object(body, "answer", DataError)
    check_shape(data, _Completion, "answer", DataError)
    return data


def read_usage(completion: dict[str, Any]) -> tuple[int, int] | None:
    """Return the number of tokens of prompt and answer; None if the server gives no valid numbers."""
    usage: Any = completion.get("usage")
    try:
        check_shape(usage, _Usage, "usage", DataError)
    except DataError:
        return None
    counts = (usage["prompt_tokens"], usage["completion_tokens"])
    return counts if any(counts) else None


def to_chat(prompt: Prompt) -> list[Message]:
    """Return the conversation, newest observation included, as messages of the chat-completions protocol."""
    heard = [message for turn in prompt.turns for message in (*turn.observation, turn.action.message())]
    messages: list[Message] = []
    waiting: list[str] = []
    for index, message in enumerate([*prompt.messages, *heard, *prompt.observation]):
        written = {key: value for key, value in message.items() if key != "reasoning_content"}
        if written.get("tool_calls"):
            calls = [_call(call, f"call_{index}_{n}") for n, call in enumerate(written["tool_calls"])]
            written["tool_calls"] = calls
            waiting = [call["id"] for call in calls]
        elif written.get("role") == "tool" and waiting:  # results have the order of the calls
            own = written.setdefault("tool_call_id", waiting[0])
            waiting = [each for each in waiting if each != own]
        messages.append(written)
    return messages


def _call(call: Mapping[str, Any], fallback: str) -> dict[str, Any]:
    """Convert a tool call from the form of chat templates to the form of the protocol."""
    function = dict(call.get("function", call))
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.get("id") or fallback,
        "type": "function",
        "function": {"name": function["name"], "arguments": text},
    }
