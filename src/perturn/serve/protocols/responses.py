"""OpenAI's responses API, with the items that agents use: messages, function calls and their results, and reasoning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perturn.formats.logs.provider_messages import without_billing_line
from perturn.serve.exchange import Answer, Ask, Refusal, Reply
from perturn.serve.protocols.chat import openai_error, wanted_format
from perturn.serve.protocols.common import (
    AskBody,
    Limit,
    check_tools,
    event,
    new_id,
    pieces,
    read_body,
    usage_of,
)

_THOUGHT = {"role", "content", "reasoning_content"}
"""Keys of a message that contains only a thought."""


class ResponsesRequest(AskBody):
    """Body of `POST /v1/responses`."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: Limit | None = None
    text: dict[str, Any] | None = None


class Responses:
    """The responses protocol, with and without streaming."""

    def read(self, body: bytes) -> Ask:
        """Parse the body of a request. The endpoint later prepends the conversation of `previous_response_id`.

        Raises:
            Refusal: If the body is malformed, or a parameter is not supported.
        """
        found = read_body(ResponsesRequest, body)
        items = [{"role": "user", "content": found.input}] if isinstance(found.input, str) else found.input
        system = [{"role": "system", "content": found.instructions}] if found.instructions else []
        messages = without_billing_line([*system, *_messages(items)])
        if not messages:
            raise Refusal(400, "input: expected text or items, got none.", "invalid_value", "input")
        return Ask(
            messages,
            tools=check_tools([_function(tool, index) for index, tool in enumerate(found.tools or [])]),
            max_tokens=found.max_output_tokens,
            response_format=wanted_format((found.text or {}).get("format"), "text.format"),
            reads_calls=found.tool_choice != "none",
            param="input",
            extra={
                "previous": found.previous_response_id,
                "instructions": found.instructions,
                "tools": found.tools or [],
            },
            **found.checked(),
        )

    def new_id(self) -> str:
        """Return the id of a new response."""
        return new_id("resp_")

    def write(self, reply: Reply, ask: Ask) -> dict[str, Any]:
        """Return the answer as JSON data."""
        answer = reply.answers[0]
        asked, said = usage_of(reply)
        return {
            **self._begun(reply, ask),
            "status": "incomplete" if answer.is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if answer.is_cut else None,
            "output": _output(reply.id, answer),
            "usage": {
                "input_tokens": asked,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": said,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": asked + said,
            },
        }

    def events(self, reply: Reply, ask: Ask) -> Iterator[str]:
        """Return the answer as server-sent events."""
        whole, begun = self.write(reply, ask), self._begun(reply, ask)
        number = 0

        def named(kind: str, **data: Any) -> str:
            nonlocal number
            number += 1
            return event(
                {"type": f"response.{kind}", "sequence_number": number - 1, **data}, f"response.{kind}"
            )

        yield named("created", response=begun)
        yield named("in_progress", response=begun)
        for index, item in enumerate(whole["output"]):
            at = {"output_index": index, "item_id": item["id"]}
            if item["type"] == "message":
                part = item["content"][0]
                text, empty = part["text"], {**part, "text": ""}
                yield named("output_item.added", output_index=index, item={**item, "content": []})
                yield named("content_part.added", **at, content_index=0, part=empty)
                for delta in pieces(text):
                    yield named("output_text.delta", **at, content_index=0, delta=delta, logprobs=[])
                yield named("output_text.done", **at, content_index=0, text=text, logprobs=[])
                yield named("content_part.done", **at, content_index=0, part=part)
            elif item["type"] == "reasoning":
                yield named("output_item.added", output_index=index, item={**item, "content": []})
            else:
                yield named("output_item.added", output_index=index, item={**item, "arguments": ""})
                for delta in pieces(item["arguments"]):
                    yield named("function_call_arguments.delta", **at, delta=delta)
                yield named(
                    "function_call_arguments.done", **at, arguments=item["arguments"], name=item["name"]
                )
            yield named("output_item.done", output_index=index, item=item)
        yield named("incomplete" if whole["status"] == "incomplete" else "completed", response=whole)

    def refusal(self, error: Refusal) -> dict[str, Any]:
        """Return an error as JSON data."""
        return openai_error(error)

    def failed(self, error: Refusal) -> str:
        """Return an error as a server-sent event."""
        said = openai_error(error)["error"]
        return event({"type": "error", "sequence_number": 0, **said, "error": said}, "error")

    def _begun(self, reply: Reply, ask: Ask) -> dict[str, Any]:
        """Return the JSON data of a response that is still in progress."""
        return {
            "id": reply.id,
            "object": "response",
            "created_at": reply.created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": ask.extra["instructions"],
            "max_output_tokens": ask.max_tokens,
            "metadata": {},
            "model": reply.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": ask.extra["previous"],
            "temperature": ask.temperature,
            "tool_choice": "auto" if ask.reads_calls else "none",
            "tools": ask.extra["tools"],
            "top_p": ask.top_p,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "usage": None,
        }


def _messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert the items of an input into messages; calls and thoughts are merged into the adjacent assistant message.

    Raises:
        Refusal: If an item is of an unsupported type.
    """
    found: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        kind, where = item.get("type", "message"), f"input[{index}]"
        if kind == "message" and isinstance(item.get("role"), str):
            message = {"role": item["role"], "content": item.get("content")}
            if item["role"] == "assistant" and found and found[-1].keys() == _THOUGHT:
                message = found.pop() | message  # the previous item was the thought of this message
            found.append(message)
        elif kind == "function_call" and isinstance(item.get("name"), str):
            function = {"name": item["name"], "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": None})
            found[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output" and isinstance(item.get("call_id"), str):
            result = {"role": "tool", "tool_call_id": item["call_id"], "content": item.get("output", "")}
            found.append(result)
        elif kind == "reasoning":
            thought = "".join(
                str(part.get("text", "")) for part in item.get("content") or item.get("summary") or []
            )
            if thought:
                found.append({"role": "assistant", "content": None, "reasoning_content": thought})
        else:
            raise Refusal(
                400, f"{where}: an item of type {kind!r:.40} is not supported.", "invalid_value", where
            )
    return found


def _function(tool: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return a tool in the form that chat templates expect.

    Raises:
        Refusal: If the tool is not a function.
    """
    if tool.get("type") != "function":
        raise Refusal(
            400,
            f"tools[{index}]: a tool of type {tool.get('type')!r:.40} is not supported; give functions.",
            "unsupported_tool",
            f"tools[{index}]",
        )
    keys = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in keys if tool.get(key) is not None}}


def _output(response: str, answer: Answer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    status = "incomplete" if answer.is_cut else "completed"
    suffix = response.removeprefix("resp_")
    if answer.action.reasoning:
        thought = [{"type": "reasoning_text", "text": answer.action.reasoning}]
        found.append({"id": f"rs_{suffix}", "type": "reasoning", "summary": [], "content": thought})
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        found.append(
            {
                "id": f"msg_{suffix}",
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": [part],
            }
        )
    for number, call in enumerate(answer.calls):
        found.append(
            {
                "id": f"fc_{suffix}_{number}",
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
        )
    return found
