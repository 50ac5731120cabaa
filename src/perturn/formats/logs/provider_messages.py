"""Convert messages and tool schemas of providers and tracing services to Perturn's format.

The module reads messages of OpenAI (chat completions and responses), Anthropic, LangChain, and the semantic conventions
of OpenTelemetry. Each message is recognised by its own keys, since a service stores the messages of any client. A
message is first converted to the format of chat completions, which `chat_messages` reads.

Sources: OpenAI's and Anthropic's API references (Create chat completion, Create a model response, Create a message);
OpenTelemetry's JSON schemas `gen-ai-input-messages.json` and `gen-ai-output-messages.json`
(open-telemetry/semantic-conventions, docs/gen-ai); langchain-core 1.8, `load.dumpd` and `messages.message_to_dict`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from perturn.data.content_parts import Said, flatten_said
from perturn.errors import DataError
from perturn.formats.chat_messages import read_answer, read_messages, with_role
from perturn.formats.logs.log_values import bad, first, mapping, unpacked
from perturn.types import Action, Message

_LANGCHAIN = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}
"""Message types of LangChain, each with its role."""
_KEPT = ("role", "content", "name", "tool_call_id")
"""Keys that are kept of a message other than an answer."""
_ITEMS = ("function_call", "function_call_output", "reasoning", "message")
"""Item types of the responses API that are read."""
_BILLING = re.compile(r"x-anthropic-billing-header:(?:(?: [\w-]+=[^;\n]*(?:;|$))+|.*)\s*", re.MULTILINE)
"""Claude Code's line before its instructions, such as `x-anthropic-billing-header: cc_version=2.1.37; cch=fa690;`. The
instructions may follow without a line break."""


def without_billing_line(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages without Claude Code's billing line, which differs in each request of a conversation.

    A message with no other instructions is left out.
    """
    found = []
    for message in messages:
        given = message.get("content")
        kept = _instructions(given) if message.get("role") in ("system", "developer") else given
        if kept == given:
            found.append(message)
        elif kept:
            found.append({**message, "content": kept})
    return found


def _instructions(content: Any) -> Any:
    """Return a text, a text part or a list of them without the billing line and without empty parts."""
    if isinstance(content, str):
        found = _BILLING.match(content)
        return content[found.end() :] if found else content
    if isinstance(content, Mapping) and "text" in content:
        return {**content, "text": _instructions(content["text"])}
    if isinstance(content, list):
        parts = map(_instructions, content)
        return [part for part in parts if part != "" and mapping(part).get("text") != ""]
    return content


def messages_of(value: Any, where: str, system: Any = None) -> tuple[Message, ...]:
    """Return the messages of a request in Perturn's format.

    Args:
        value: A list of messages or one message, which may be JSON text. Any other text is a user message.
        where: Location of the messages, for error messages.
        system: Instructions outside the messages: a text or a list of text parts.

    Raises:
        DataError: If a message has an unknown format, or holds something that training cannot use, such as an image.
    """
    instructions = _texts(system, f"{where}.system") if system else ""
    head = [{"role": "system", "content": instructions}] if instructions else []
    return tuple(_ours(one, where) for one in without_billing_line([*head, *_chat(value, where)]))


def answer_of(value: Any, where: str) -> Action | None:
    """Return an answer as an action; None if it is empty.

    Args:
        value: An assistant message, or the items or messages that together form one answer, or text.
        where: Location of the answer, for error messages.

    Raises:
        DataError: If the answer has an unknown format, or holds something that training cannot use.
    """
    value = parsed(value, where)
    said = [{"role": "assistant", "content": value}] if isinstance(value, str) else list(_chat(value, where))
    if any(one.get("role") != "assistant" for one in said):
        raise bad(where, "an assistant message", next(one.get("role") for one in said))
    if len(said) > 1:
        raise DataError(f"{where}: expected one assistant message, got {len(said)}.")
    if not said:
        return None
    action = _action(said[0], where)
    return action if action.text or action.tool_calls or action.reasoning else None


def tools_of(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """Return tool schemas in the format of chat templates. Tools that the provider itself runs are left out.

    Raises:
        DataError: If the value is not a list of objects.
    """
    value = unpacked(value, where)
    if value in (None, "", {}):
        return ()
    if not isinstance(value, list):
        raise bad(where, "a list of tools", value)
    return tuple(tool for each in value if (tool := _tool(unpacked(each, where), where)))


def _tool(tool: Any, where: str) -> Mapping[str, Any] | None:
    """Return a tool schema in the format of chat templates; None if the provider itself runs the tool."""
    if not isinstance(tool, Mapping):
        raise bad(where, "a tool schema", tool)
    if isinstance(tool.get("function"), Mapping):
        return {"type": "function", "function": dict(tool["function"])}
    if not isinstance(tool.get("name"), str) or tool.get("type", "function") not in (
        "function",
        "custom",
        None,
    ):
        return None
    found = {key: tool[key] for key in ("name", "description") if tool.get(key)}
    schema = first(tool, "parameters", "input_schema")
    return {
        "type": "function",
        "function": {**found, "parameters": schema or {"type": "object", "properties": {}}},
    }


def _ours(message: Mapping[str, Any], where: str) -> Message:
    """Return a chat-completions message in Perturn's format. Fields that only its provider reads are left out."""
    if message.get("role") == "assistant":
        return _action(message, where).message()
    kept = {key: message[key] for key in _KEPT if message.get(key) is not None}
    return read_messages([kept], where, set())[0].message


def _action(message: Mapping[str, Any], where: str) -> Action:
    """Return an assistant message as an action.

    Raises:
        DataError: If a tool call of the message names no function.
    """
    action = read_answer(message, where)
    for call in action.tool_calls:
        if not isinstance(mapping(call.get("function")).get("name"), str):
            raise bad(f"{where}.tool_calls", "calls with the name of a function", call)
    return action


def _chat(value: Any, where: str) -> Iterator[dict[str, Any]]:
    """Yield messages in the format of chat completions."""
    value = parsed(value, where)
    if isinstance(value, str):
        yield {"role": "user", "content": value}
        return
    if isinstance(value, Mapping):
        value = value["messages"] if isinstance(value.get("messages"), list) else [value]
    if not isinstance(value, list):
        raise bad(where, "a list of messages", value)
    if len(value) == 1 and isinstance(value[0], list):
        value = value[0]  # a batch of one conversation in LangChain
    answer: dict[str, Any] | None = None
    for index, each in enumerate(value):
        for one in _shaped(each, f"{where}[{index}]"):
            is_more = one.pop("continues", False) and answer is not None
            if answer is not None and not is_more:
                yield answer
            if one.get("role") == "assistant":
                answer = _joined(answer, one, f"{where}[{index}]") if is_more and answer else one
            else:
                answer = None
                yield one
    if answer is not None:
        yield answer


def parsed(value: Any, where: str) -> Any:
    """Parse messages, or the body of a response, if they are given as JSON text.

    Any other text is returned unchanged, even an answer that happens to be JSON.
    """
    if not isinstance(value, str):
        return value
    found = unpacked(value, where)
    return found if is_known(found) else value


def is_known(held: Any) -> bool:
    """Return whether a value is a message, a list of messages, or the body of a response."""
    while isinstance(held, list) and held:
        held = held[0]
    if not isinstance(held, Mapping):
        return False
    lists = any(isinstance(held.get(key), list) for key in ("messages", "parts", "choices", "output"))
    return "role" in held or "lc" in held or lists or held.get("type") in (*_ITEMS, *_LANGCHAIN)


def _joined(answer: Mapping[str, Any], more: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Merge an item of the responses API into the answer that it continues."""
    both = answer, more
    said = [flatten_said(one.get("content") or "", where) for one in both]
    parts = [one if isinstance(one, Said) else Said(str(one)) for one in said]
    thoughts = [
        f"{one.get('reasoning_content') or ''}{part.reasoning}" for one, part in zip(both, parts, strict=True)
    ]
    calls = [call for one in both for call in one.get("tool_calls") or ()]
    content = "".join(part.text for part in parts)
    return {
        "role": "assistant",
        "content": content,
        "reasoning_content": "".join(thoughts),
        "tool_calls": calls,
    }


def _shaped(message: Any, where: str) -> Iterator[dict[str, Any]]:
    """Convert a message of any known format to messages of chat completions."""
    if isinstance(message, str):
        yield {"role": "user", "content": message}
        return
    if not isinstance(message, Mapping):
        raise bad(where, "a message", message)
    named = with_role(message)
    for is_shape, read in _SHAPES:
        if is_shape(named):
            yield from read(named, where)
            return
    yield named


def _langchain(message: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """Yield a message of LangChain, in the format of `dumpd`, `message_to_dict` or `model_dump`."""
    held = mapping(first(message, "kwargs", "data")) or message
    kind = str(held.get("type") or message.get("type"))
    if "lc" in message and kind not in _LANGCHAIN:
        kind = str((message.get("id") or [""])[-1]).removesuffix("Chunk").removesuffix("Message").lower()
    if kind not in _LANGCHAIN:
        raise bad(f"{where}.type", "a message of LangChain", kind)
    shaped = {"role": _LANGCHAIN[kind], "content": held.get("content") or ""}
    if held.get("tool_call_id"):
        shaped["tool_call_id"] = held["tool_call_id"]
    if shaped["role"] == "assistant":
        more = mapping(held.get("additional_kwargs"))
        shaped["tool_calls"] = first(held, "tool_calls") or first(more, "tool_calls") or []
        shaped["function_call"] = None if shaped["tool_calls"] else more.get("function_call")
        shaped["reasoning_content"] = more.get("reasoning_content")
    yield from _anthropic(shaped, where, keeps_calls=bool(shaped.get("tool_calls")))


def _anthropic(
    message: Mapping[str, Any], where: str, *, keeps_calls: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the messages in a message of content blocks: first a message for each tool result, then the rest.

    Args:
        message: The message.
        where: Location of the message, for error messages.
        keeps_calls: Whether the tool calls are also given outside the blocks, as in LangChain. Calls in blocks are then
            ignored.
    """
    content = message.get("content")
    if not isinstance(content, list):
        yield dict(message)
        return
    said, thoughts, calls = [], [], []
    for index, block in enumerate(content):
        kind, at = block.get("type") if isinstance(block, Mapping) else None, f"{where}.content[{index}]"
        if kind == "tool_use":
            calls.append(_call(block.get("id"), block.get("name"), block.get("input")))
        elif kind == "tool_result":
            result = _result(block.get("content"), at)
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind not in ("redacted_thinking", "function_call", "tool_call"):
            said.append(block)
    others = {key: value for key, value in message.items() if key != "content"}
    if thoughts and not others.get("reasoning_content"):
        others["reasoning_content"] = "".join(thoughts)
    if calls and not keeps_calls:
        others["tool_calls"] = calls
    if said or others.get("role") == "assistant":
        yield {**others, "content": said}


def _result(content: Any, where: str) -> Any:
    """Return the result of a tool; parts of text are joined to one text."""
    is_parts = isinstance(content, list) and content and all(isinstance(each, Mapping) for each in content)
    return _texts(content, where) if is_parts else "" if content is None else content


def _item(item: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """Yield an item of the responses API as a message. Consecutive items of an answer continue the same message."""
    kind = item.get("type")
    if kind == "function_call":
        call = _call(first(item, "call_id", "id"), item.get("name"), item.get("arguments"))
        yield {"role": "assistant", "content": "", "tool_calls": [call], "continues": True}
    elif kind == "function_call_output":
        yield {
            "role": "tool",
            "tool_call_id": item.get("call_id"),
            "content": _result(item.get("output"), where),
        }
    elif kind == "reasoning":
        thought = _texts(first(item, "content", "summary") or "", where)
        yield {"role": "assistant", "content": "", "reasoning_content": thought, "continues": True}
    else:
        yield from _anthropic(
            {**item, "continues": item.get("role") == "assistant"}, where
        )  # an assistant message continues the answer too


def _of_parts(message: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """Yield a message in parts, as OpenTelemetry's conventions define it; each tool result is a separate message."""
    role = str(message.get("role"))
    texts, thoughts, calls, results = [], [], [], []
    for index, part in enumerate(message["parts"]):
        part = {"type": "text", "content": part} if isinstance(part, str) else mapping(part)
        kind, at = part.get("type", "text"), f"{where}.parts[{index}]"
        if kind == "text":
            texts.append(str(first(part, "content", "text") or ""))
        elif kind in ("reasoning", "thinking"):
            thoughts.append(str(first(part, "content", "text") or ""))
        elif kind == "tool_call":
            calls.append(_call(part.get("id"), part.get("name"), part.get("arguments")))
        elif kind == "tool_call_response":
            response = _result(first(part, "response", "result"), at)
            results.append({"role": "tool", "tool_call_id": part.get("id"), "content": response})
        else:
            raise bad(at, "a part of text, thought, tool_call or tool_call_response", kind)
    yield from results
    if role == "assistant":
        yield {
            "role": role,
            "content": "".join(texts),
            "reasoning_content": "".join(thoughts),
            "tool_calls": calls,
        }
    elif texts or not results:
        yield {"role": role, "content": "".join(texts)}


def _call(identity: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Return a tool call in the format of chat completions."""
    given = {} if arguments is None else arguments
    return {
        "id": identity,
        "type": "function",
        "function": {
            "name": name,
            "arguments": given if isinstance(given, str | Mapping) else json.dumps(given),
        },
    }


def _texts(value: Any, where: str) -> str:
    """Join parts of text to one text.

    Raises:
        DataError: If a part is not text.
    """
    if isinstance(value, str):
        return value
    parts: Sequence[Any] = value if isinstance(value, list) else [value]
    found = []
    for index, part in enumerate(parts):
        text = part if isinstance(part, str) else first(mapping(part), "text", "content")
        if (
            text is None
            and isinstance(part, Mapping)
            and part.get("type", "text") in ("text", "summary_text")
        ):
            text = ""
        if not isinstance(text, str):
            raise bad(f"{where}[{index}]", "text", part)
        found.append(text)
    return "".join(found)


_Shape = tuple[
    Callable[[Mapping[str, Any]], bool], Callable[[Mapping[str, Any], str], Iterator[dict[str, Any]]]
]

_SHAPES: tuple[_Shape, ...] = (
    (lambda one: "lc" in one or (str(one.get("type")) in _LANGCHAIN and "role" not in one), _langchain),
    (lambda one: one.get("type") in _ITEMS and ("role" in one or one["type"] != "message"), _item),
    (lambda one: isinstance(one.get("parts"), list), _of_parts),
    (lambda one: isinstance(one.get("content"), list), _anthropic),
)
"""Message formats, in the order in which they are tried."""
