"""OpenAI's chat completions API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from perturn.formats.logs.provider_messages import without_billing_line
from perturn.serve.exchange import Answer, Ask, Call, Refusal, Reply
from perturn.serve.protocols.common import (
    AskBody,
    Limit,
    check_tools,
    event,
    new_id,
    pieces,
    read_body,
    texts,
    usage_of,
)

Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class ChatRequest(AskBody):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=100_000)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1, le=10**6)] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    stream_options: dict[str, Any] | None = None


class Chat:
    """The chat completions protocol, with and without streaming."""

    def read(self, body: bytes) -> Ask:
        """Parse the body of a request.

        Raises:
            Refusal: If the body is malformed, or a parameter is not supported.
        """
        found = read_body(ChatRequest, body)
        return Ask(
            without_billing_line(found.messages),
            tools=check_tools(found.tools or []),
            max_tokens=found.max_completion_tokens or found.max_tokens,
            stop=texts(found.stop),
            seed=found.seed,
            n=found.n or 1,
            response_format=wanted_format(found.response_format, "response_format"),
            logprobs=bool(found.logprobs),
            reads_calls=found.tool_choice != "none",
            extra={"usage": bool((found.stream_options or {}).get("include_usage"))},
            **found.checked(),
        )

    def new_id(self) -> str:
        """Return the id of a new response."""
        return new_id("chatcmpl-")

    def write(self, reply: Reply, ask: Ask) -> dict[str, Any]:
        """Return the answer as JSON data."""
        choices = []
        for index, answer in enumerate(reply.answers):
            message: dict[str, Any] = {"role": "assistant", "content": answer.text}
            if answer.calls:
                message["content"] = answer.text or None
                message["tool_calls"] = [_call(call) for call in answer.calls]
            if answer.action.reasoning:
                message["reasoning_content"] = answer.action.reasoning
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "finish_reason": _finish(answer),
                    "logprobs": _logprobs(reply, index) if ask.logprobs else None,
                }
            )
        return {**_head(reply, "chat.completion"), "choices": choices, "usage": _usage(reply)}

    def events(self, reply: Reply, ask: Ask) -> Iterator[str]:
        """Return the answer as server-sent events."""
        head = _head(reply, "chat.completion.chunk")

        def chunk(index: int, delta: Mapping[str, Any], **more: Any) -> str:
            choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None, **more}
            return event({**head, "choices": [choice]})

        for index, answer in enumerate(reply.answers):
            yield chunk(index, {"role": "assistant", "content": ""})
            for text in pieces(answer.action.reasoning):
                yield chunk(index, {"reasoning_content": text})
            for text in pieces(answer.text):
                yield chunk(index, {"content": text})
            for number, call in enumerate(answer.calls):
                opened = _call(Call(call.id, call.name, ""))
                yield chunk(index, {"tool_calls": [{"index": number, **opened}]})
                for text in pieces(call.arguments):
                    yield chunk(index, {"tool_calls": [{"index": number, "function": {"arguments": text}}]})
            logprobs = _logprobs(reply, index) if ask.logprobs else None
            yield chunk(index, {}, finish_reason=_finish(answer), logprobs=logprobs)
        if ask.extra["usage"]:
            yield event({**head, "choices": [], "usage": _usage(reply)})
        yield "data: [DONE]\n\n"

    def refusal(self, error: Refusal) -> dict[str, Any]:
        """Return an error as JSON data."""
        return openai_error(error)

    def failed(self, error: Refusal) -> str:
        """Return an error as a server-sent event."""
        return event(self.refusal(error))


def openai_error(error: Refusal) -> dict[str, Any]:
    """Return an error as JSON data in the form of OpenAI's APIs."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def wanted_format(given: Any, key: str) -> Mapping[str, Any] | None:
    """Return the requested response format in the form of chat completions; None for text.

    The other APIs write the parts of a JSON schema beside its type.

    Args:
        given: The format in the request.
        key: Key of the format in the request, for the error message.

    Raises:
        Refusal: If the format is unknown.
    """
    kind = given.get("type") if isinstance(given, Mapping) else given
    if kind is None or kind == "text":
        return None
    if not isinstance(given, Mapping) or kind not in ("json_object", "json_schema"):
        raise Refusal(400, f"{key}.type: expected text, json_object or json_schema.", "invalid_value", key)
    if kind == "json_schema" and "json_schema" not in given:
        return {"type": kind, kind: {"name": "answer", **{key: given[key] for key in given if key != "type"}}}
    return given


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": reply.id, "object": kind, "created": reply.created, "model": reply.model}


def _usage(reply: Reply) -> dict[str, int]:
    asked, said = usage_of(reply)
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}


def _finish(answer: Answer) -> str:
    return "length" if answer.is_cut else "tool_calls" if answer.calls else "stop"


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs(reply: Reply, index: int) -> dict[str, Any]:
    """Return the log-probability of each sampled token at temperature 1, in nats, including the end-of-turn token.

    A token that holds a part of a character has no `bytes`, since its text is not what the token stands for.
    """
    found = zip(reply.token_texts[index], reply.answers[index].action.logprobs or (), strict=True)
    content = [
        {
            "token": text,
            "logprob": logprob,
            "bytes": None if "\ufffd" in text else list(text.encode()),
            "top_logprobs": [],
        }
        for text, logprob in found
    ]
    return {"content": content, "refusal": None}
