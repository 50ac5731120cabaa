"""Helpers that the protocols share: parsing of request bodies, checks, and server-sent events."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from perturn.errors import did_you_mean
from perturn.io.plain_data import fault
from perturn.serve.exchange import Ask, Refusal, Reply

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("allowed_token_ids", "structural_tag", "structured_outputs", "truncate_prompt_tokens"), ()
    ),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), ()),
    **dict.fromkeys(("chat_template", "ebnf", "enable_thinking", "grammar", "json_schema", "regex"), ()),
    **dict.fromkeys(("container", "conversation", "prompt", "web_search_options"), ()),
    **dict.fromkeys(
        ("max_completion_tokens", "max_new_tokens", "max_output_tokens", "max_tokens", "seed"), ()
    ),
    **dict.fromkeys(("dry_multiplier", "frequency_penalty", "min_p", "min_tokens"), (0,)),
    **dict.fromkeys(("presence_penalty", "top_a", "top_logprobs", "xtc_probability"), (0,)),
    **dict.fromkeys(
        ("best_of", "length_penalty", "n", "repeat_penalty", "repetition_penalty", "typical_p"), (1,)
    ),
    **dict.fromkeys(("add_special_tokens", "background", "continue_final_message", "echo"), (False,)),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "logprobs", "use_beam_search"), (False,)),
    **dict.fromkeys(("bad_words", "functions", "logits_processors", "mcp_servers", "stop_token_ids"), ([],)),
    **dict.fromkeys(("instructions", "stop", "stop_sequences", "system"), ("", [])),
    "add_generation_prompt": (True,),
    "function_call": ("auto", "none"),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "top_k": (-1, 0),
    "truncation": ("disabled",),
}
"""Parameter that changes the answer -> its accepted values besides null if the protocol does not declare it."""
RESERVED = frozenset(
    (
        *("chat_template", "continue_final_message", "conversation", "documents", "max_length", "messages"),
        *("add_generation_prompt", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self"),
        *("padding", "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
    )
)
"""Names that template variables cannot have, since they are arguments of `apply_chat_template`."""
Limit = Annotated[int, Field(ge=1, le=10**9)]

_STEM, _NUMBERS = secrets.token_hex(8), count()


class Strict(BaseModel):
    """Base class of request bodies. Unknown keys are ignored, unless they change the answer."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class AskBody(Strict):
    """Base class of the bodies of model requests."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def checked(self) -> dict[str, Any]:
        """Return the arguments of `Ask` that all protocols share.

        Raises:
            Refusal: If a template variable cannot be rendered.
        """
        variables, key = self.chat_template_kwargs or {}, "chat_template_kwargs"
        check_plain(variables, key)
        if reserved := sorted(RESERVED & variables.keys()):
            said = f"{key}: {reserved[0]!r} is not a variable of a template. Leave it out."
            raise Refusal(400, said, "invalid_value", key)
        return {
            "model": self.model,
            "template_kwargs": variables,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "stream": bool(self.stream),
        }


class OwnBody(Strict):
    """Base class of the bodies of Perturn's own requests. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid")


Body = TypeVar("Body", bound=Strict)


class ServedProtocol(Protocol):
    """Interface of a model provider's protocol, server side."""

    def read(self, body: bytes) -> Ask:
        """Parse the body of a request.

        Raises:
            Refusal: If the body is malformed, or a parameter is not supported.
        """
        ...

    def new_id(self) -> str:
        """Return the id of a new response."""
        ...

    def write(self, reply: Reply, ask: Ask) -> dict[str, Any]:
        """Return the answer as JSON data."""
        ...

    def events(self, reply: Reply, ask: Ask) -> Iterator[str]:
        """Return the answer as server-sent events."""
        ...

    def refusal(self, error: Refusal) -> dict[str, Any]:
        """Return an error as JSON data."""
        ...

    def failed(self, error: Refusal) -> str:
        """Return an error as a server-sent event."""
        ...


def read_body(kind: type[Body], body: bytes) -> Body:
    """Parse a body by its schema.

    Raises:
        Refusal: If the body is malformed, or a parameter is not supported. The message names the first wrong value.
    """
    try:
        found = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        position = ".".join(str(step) for step in first["loc"])
        if first["type"] == "json_invalid":
            raise Refusal(400, f"the body is not JSON: {first['msg']}.", "invalid_json") from None
        said = f"{position or 'body'}: {first['msg']}."
        if first["type"] == "extra_forbidden":
            said = f"unknown key {position!r:.80}.{did_you_mean(position, kind.model_fields)}"
        raise Refusal(400, said, "invalid_value", position or None) from None
    for key, neutral in _NEUTRAL.items():
        value = (found.model_extra or {}).get(key)
        if value is not None and value not in neutral:
            remedy = "Pass it in chat_template_kwargs." if key == "enable_thinking" else "Leave it out."
            said = f"{key}={value!r:.80} is not supported here. {remedy}"
            raise Refusal(400, said, "unsupported_parameter", key)
    return found


def check_plain(value: object, param: str) -> None:
    """Check that a value can be stored and rendered; NaN, for example, cannot.

    Raises:
        Refusal: If the value cannot be stored or rendered. The message names the wrong part.
    """
    if found := fault(value, param):
        raise Refusal(400, f"{found}.", "invalid_value", param)


def new_id(prefix: str) -> str:
    """Return an id that no other response has, in this process or another one."""
    return f"{prefix}{_STEM}{next(_NUMBERS):08x}"


def texts(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the non-empty stop texts as a tuple."""
    given = [value] if isinstance(value, str) else value or []
    return tuple(text for text in given if text)


def check_tools(tools: Sequence[Mapping[str, Any]], param: str = "tools") -> tuple[Mapping[str, Any], ...]:
    """Check tools, and return them in the form that chat templates expect.

    Raises:
        Refusal: If a tool is not a function.
    """
    for index, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if tool.get("type") != "function" or not isinstance(name, str) or not name:
            raise Refusal(
                400,
                f"{param}[{index}]: expected a function with a name.",
                "invalid_tools",
                f"{param}[{index}]",
            )
    if found := fault(list(tools), param):
        raise Refusal(400, f"{found}.", "invalid_tools", param)
    return tuple(tools)


def event(data: Mapping[str, Any], name: str | None = None) -> str:
    """Return one server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n"


def pieces(text: str, size: int = 200) -> Iterable[str]:
    """Split a text into parts of at most `size` characters, for streaming."""
    return (text[start : start + size] for start in range(0, len(text), size))


def usage_of(reply: Reply) -> tuple[int, int]:
    """Return the numbers of tokens of the prompt and of the answers."""
    return reply.prompt_tokens, reply.answer_tokens
