"""Anthropic's messages API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from perturn.formats.logs.provider_messages import without_billing_line
from perturn.serve.exchange import Answer, Ask, Refusal, Reply
from perturn.serve.protocols.chat import wanted_format
from perturn.serve.protocols.common import (
    AskBody,
    Limit,
    Strict,
    check_tools,
    event,
    new_id,
    pieces,
    read_body,
    texts,
    usage_of,
)

_IGNORED = {"thinking", "redacted_thinking"}
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class _Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class _Tool(Strict):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any]


class MessagesRequest(AskBody):
    """Body of `POST /v1/messages`."""

    messages: Annotated[list[_Message], Field(min_length=1, max_length=100_000)]
    max_tokens: Limit
    system: str | list[dict[str, Any]] | None = None
    tools: list[_Tool] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None


class Messages:
    """The messages protocol, with and without streaming."""

    def read(self, body: bytes) -> Ask:
        """Parse the body of a request.

        Raises:
            Refusal: If the body is malformed, or a parameter is not supported.
        """
        found = read_body(MessagesRequest, body)
        system = [{"role": "system", "content": found.system}] if found.system else []
        said = [each for index, message in enumerate(found.messages) for each in _split(message, index)]
        if said[-1]["role"] == "assistant":
            raise Refusal(
                400,
                "messages: the last message must be of the user; an answer that is begun (prefill) is not supported.",
                "invalid_messages",
            )
        key, form = "output_format", found.output_format
        if not form:
            key, form = "output_config.format", (found.output_config or {}).get("format")
        return Ask(
            without_billing_line([*system, *said]),
            tools=check_tools([_function(tool) for tool in found.tools or []]),
            max_tokens=found.max_tokens,
            stop=texts(found.stop_sequences),
            response_format=wanted_format(form, key),
            reads_calls=(found.tool_choice or {}).get("type") != "none",
            **found.checked(),
        )

    def new_id(self) -> str:
        """Return the id of a new response."""
        return new_id("msg_")

    def write(self, reply: Reply, ask: Ask) -> dict[str, Any]:
        """Return the answer as JSON data."""
        answer, usage = reply.answers[0], usage_of(reply)
        content: list[dict[str, Any]] = []
        if answer.action.reasoning:
            content.append({"type": "thinking", "thinking": answer.action.reasoning, "signature": ""})
        if answer.text or not answer.calls:
            content.append({"type": "text", "text": answer.text})
        for call in answer.calls:
            content.append(
                {"type": "tool_use", "id": call.id, "name": call.name, "input": _object(call.arguments)}
            )
        return {
            "id": reply.id,
            "type": "message",
            "role": "assistant",
            "model": reply.model,
            "content": content,
            "stop_reason": _reason(answer),
            "stop_sequence": answer.stopped_by,
            "usage": {"input_tokens": usage[0], "output_tokens": usage[1]},
        }

    def events(self, reply: Reply, ask: Ask) -> Iterator[str]:
        """Return the answer as server-sent events."""
        whole = self.write(reply, ask)
        content, reason, stop = whole["content"], whole["stop_reason"], whole["stop_sequence"]
        begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
        yield _named("message_start", message={**begun, "usage": {**whole["usage"], "output_tokens": 1}})
        for index, block in enumerate(content):
            key, kind, text = _delta(block)
            empty: Any = {} if block["type"] == "tool_use" else ""
            field = "input" if block["type"] == "tool_use" else block["type"]
            yield _named("content_block_start", index=index, content_block={**block, field: empty})
            for part in pieces(text):
                yield _named("content_block_delta", index=index, delta={"type": kind, key: part})
            yield _named("content_block_stop", index=index)
        yield _named(
            "message_delta", delta={"stop_reason": reason, "stop_sequence": stop}, usage=whole["usage"]
        )
        yield _named("message_stop")

    def refusal(self, error: Refusal) -> dict[str, Any]:
        """Return an error as JSON data."""
        kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        is_full = error.code == "context_length_exceeded"  # Claude Code compacts when it reads these words
        said = f"prompt is too long: {error.message}" if is_full else error.message
        return {"type": "error", "error": {"type": kind, "message": said, "code": error.code}}

    def failed(self, error: Refusal) -> str:
        """Return an error as a server-sent event."""
        return event(self.refusal(error), "error")


def _split(message: _Message, index: int) -> list[dict[str, Any]]:
    """Convert a message into chat-completions messages; each tool result becomes a separate message.

    Args:
        message: Message with text or with content blocks.
        index: Index of the message, for error messages.

    Raises:
        Refusal: If a block is of an unsupported type.
    """
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    found: list[dict[str, Any]] = []
    said: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(message.content):
        kind, where = block.get("type"), f"messages[{index}].content[{number}]"
        if kind == "tool_result" and isinstance(block.get("tool_use_id"), str):
            content = block.get("content", "")
            found.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
        elif (
            kind == "tool_use"
            and isinstance(block.get("name"), str)
            and isinstance(block.get("input"), Mapping)
        ):
            function = {"name": block["name"], "arguments": dict(block["input"])}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "text" and isinstance(block.get("text"), str):
            said.append({"type": "text", "text": block["text"]})
        elif kind == "thinking" and message.role == "assistant":
            said.append({"type": "thinking", "thinking": str(block.get("thinking", ""))})
        elif kind not in _IGNORED:
            raise Refusal(
                400, f"{where}: a block of type {kind!r:.40} is not supported.", "invalid_messages", where
            )
    if said or calls or not found:
        found.append({"role": message.role, "content": said} | ({"tool_calls": calls} if calls else {}))
    return found


def _function(tool: _Tool) -> dict[str, Any]:
    described = {"description": tool.description} if tool.description is not None else {}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _object(arguments: str) -> Any:
    """Parse a call's arguments as a JSON object; any other value is returned under the key `arguments`."""
    try:
        found = json.loads(arguments)
    except ValueError:
        found = arguments
    return found if isinstance(found, Mapping) else {"arguments": found}


def _delta(block: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the key, type and text with which a content block is streamed."""
    if block["type"] == "tool_use":
        return "partial_json", "input_json_delta", json.dumps(block["input"])
    return block["type"], f"{block['type']}_delta", str(block[block["type"]])


def _reason(answer: Answer) -> str:
    if answer.is_cut:
        return "max_tokens"
    if answer.calls:
        return "tool_use"
    return "end_turn" if answer.stopped_by is None else "stop_sequence"


def _named(name: str, **data: Any) -> str:
    return event({"type": name, **data}, name)
