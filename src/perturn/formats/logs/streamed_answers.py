"""Join the parts of a streamed answer in a log, which are server-sent events or a list of chunks.

Sources: OpenAI's API reference (The chat completion chunk object; Streaming events of responses); Anthropic's
"Streaming messages". The parts are joined as the clients of both providers join them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from perturn.formats.logs.log_values import mapping, objects, unpacked

_EVENT = re.compile(r"[\ufeff\s]*(?:data:|event:|id:|retry:|:)")
"""First line of a stream of server-sent events. A line that begins with a colon is a comment, such as a keep-alive."""
_LINE_END = re.compile(r"\r\n|\n|\r")
"""Line ends of server-sent events. Others, such as U+2028, belong to the data."""


def joined(response: Any) -> Any:
    """Return the answer that streamed events form together. Return any other response unchanged.

    The answer of a stream that ends early counts as cut, as if by a token limit.
    """
    if isinstance(response, str) and _EVENT.match(response):
        events = list(_events(response))
        response = events if any(isinstance(each, Mapping) for each in events) else response
    response = unpacked(response, "")
    if (
        not isinstance(response, list)
        or not response
        or not all(isinstance(each, Mapping) for each in response)
    ):
        return response
    if any(each.get("object") == "chat.completion.chunk" for each in response):
        return _of_chunks(response)
    kinds = {str(each.get("type")): each for each in response}
    if done := kinds.get("response.completed") or kinds.get("response.incomplete"):
        return done.get("response")
    return _of_blocks(response) if "message_start" in kinds else response


def _events(text: str) -> Iterator[Any]:
    """Yield the data of server-sent events."""
    for line in _LINE_END.split(text):
        field, _, data = line.lstrip("\ufeff \t").partition(":")
        if field == "data" and data.strip() not in ("", "[DONE]"):
            yield unpacked(data.strip(), "")


def _of_chunks(chunks: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the chunks of a chat completion."""
    whole: dict[str, Any] = {"object": "chat.completion", "choices": []}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        whole |= {key: chunk[key] for key in ("id", "model", "created", "usage") if chunk.get(key)}
        for part in objects(chunk.get("choices")):
            at = _index(part, 0)
            choice = choices.setdefault(at, {"index": at, "message": {"role": "assistant", "content": ""}})
            _add(choice["message"], mapping(part.get("delta")))
            choice["finish_reason"] = part.get("finish_reason") or choice.get("finish_reason")
    for choice in choices.values():
        choice["finish_reason"] = choice["finish_reason"] or "length"
    whole["choices"] = [choices[at] for at in sorted(choices)]
    return whole


def _add(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Append the delta of a chunk to a message."""
    for key in ("content", "refusal", "reasoning_content", "reasoning"):
        if isinstance(delta.get(key), str):
            message[key] = (message.get(key) or "") + delta[key]
    for part in objects(delta.get("tool_calls")):
        calls = message.setdefault("tool_calls", [])
        at = _index(part, len(calls))
        while len(calls) <= at < len(calls) + 100:
            calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
        if not 0 <= at < len(calls):
            continue
        calls[at]["id"] = part.get("id") or calls[at]["id"]
        for key in ("name", "arguments"):
            calls[at]["function"][key] += _text(mapping(part.get("function")).get(key))


def _of_blocks(events: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Join Anthropic's events to a message."""
    whole: dict[str, Any] = {}
    blocks: dict[int, dict[str, Any]] = {}
    for event in events:
        kind, at = event.get("type"), _index(event, 0)
        if kind == "message_start":
            whole |= mapping(event.get("message"))
        elif kind == "content_block_start":
            blocks[at] = {**mapping(event.get("content_block")), "partial": ""}
        elif kind == "content_block_delta" and at in blocks:
            delta = mapping(event.get("delta"))
            for key in ("text", "thinking"):
                if isinstance(delta.get(key), str):
                    blocks[at][key] = (blocks[at].get(key) or "") + delta[key]
            blocks[at]["partial"] += _text(delta.get("partial_json"))
        elif kind == "message_delta":
            whole |= {key: value for key, value in mapping(event.get("delta")).items() if value is not None}
    for block in blocks.values():
        if partial := block.pop("partial"):
            block["input"] = json.loads(partial) if _is_json(partial) else partial
    stop = whole.get("stop_reason") or "max_tokens"
    return {**whole, "stop_reason": stop, "content": [blocks[at] for at in sorted(blocks)]}


def _index(part: Mapping[str, Any], usual: int) -> int:
    """Return the index of a part; the usual one if the part has none."""
    found = part.get("index")
    return found if isinstance(found, int) else usual


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _is_json(text: str) -> bool:
    return isinstance(unpacked(text, ""), Mapping)
