"""Schema of a chat completion: the fields that must be there for an answer to be read."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from perturn.errors import DataError
from perturn.io.read_input import check_shape, parse_object

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
    """The answer of a server, its choices checked; of what it cost, see `read_usage`.

    Raises:
        DataError: If it is no chat completion, naming the first value that is not as it must be.
    """
    data = parse_object(body, "answer", DataError)
    check_shape(data, _Completion, "answer", DataError)
    return data


def read_usage(completion: dict[str, Any]) -> tuple[int, int] | None:
    """Tokens of the prompt and of the answer; None where the server does not say, or says what cannot be."""
    usage: Any = completion.get("usage")
    try:
        check_shape(usage, _Usage, "usage", DataError)
    except DataError:
        return None
    counts = (usage["prompt_tokens"], usage["completion_tokens"])
    return counts if any(counts) else None
