"""Read calls of models from the spans and events of OpenTelemetry, in the format of the OTLP file exporter.

A line holds `resourceSpans` or `resourceLogs` (opentelemetry.io/docs/specs/otel/protocol/file-exporter). The messages
of a call are read from the first of these sources that it has:

- `gen_ai.input.messages` and `gen_ai.output.messages`, with `gen_ai.system_instructions` and `gen_ai.tool.definitions`,
  as attributes of a span or of an event `gen_ai.client.inference.operation.details` (semantic conventions from 1.37 on,
  docs/gen-ai/gen-ai-spans.md and gen-ai-events.md);
- the events `gen_ai.system.message`, `gen_ai.user.message`, `gen_ai.assistant.message`, `gen_ai.tool.message` and
  `gen_ai.choice` (conventions up to 1.36), as log records or as events of a span;
- OpenInference's `llm.input_messages.N...` and `llm.output_messages.N...` (Arize-ai/openinference,
  spec/semantic_conventions.md);
- OpenLLMetry's `gen_ai.prompt.N...` and `gen_ai.completion.N...` (traceloop/openllmetry, semantic conventions).

Scores are events `gen_ai.evaluation.result`. `gen_ai.conversation.id` or `session.id` names the session.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from perturn.errors import DataError
from perturn.formats.json_stream import Record
from perturn.formats.logs.log_entries import Call, Entry, Fields, LostEntry, of_another, score_of
from perturn.formats.logs.log_values import (
    at_path,
    first,
    ids_of,
    mapping,
    objects,
    score_value,
    seconds,
    text_id,
    unpacked,
)
from perturn.formats.logs.provider_messages import messages_of, tools_of
from perturn.formats.logs.request_logs import answers_in, is_cut, named_score

_DETAILS, _RESULT, _CHOICE = (
    "gen_ai.client.inference.operation.details",
    "gen_ai.evaluation.result",
    "gen_ai.choice",
)
_ROLES = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
"""Events of the older conventions, each with the role of its message."""
_SESSION = ("gen_ai.conversation.id", "session.id", "langfuse.session.id")
_OPERATIONS = ("chat", "text_completion", "generate_content")
_WITHOUT_CHOICES = ("end_turn", "max_tokens", "pause_turn", "refusal", "stop_sequence", "tool_use")
"""Stop reasons of Anthropic, whose responses have no choices. OpenLLMetry may repeat the reason at each block."""
_MOST_OPEN = 10_000
"""Maximum number of calls whose events are collected at a time."""


def is_otel(record: Mapping[str, Any]) -> bool:
    """Return whether a record is a line of the OTLP file exporter."""
    return any(isinstance(record.get(key), list) for key in ("resourceSpans", "resourceLogs"))


def read_otel(records: Iterator[Record], fields: Fields) -> Iterator[Entry]:
    """Yield the calls and scores of spans and events."""
    opened: OrderedDict[str, _Events] = OrderedDict()
    for record in records:
        if isinstance(record.value, DataError):
            yield LostEntry(record.where, "broken", str(record.value))
            continue
        for span in _nested(record.value, "resourceSpans", "scopeSpans", "spans"):
            yield from _guarded(_Source(span, record.where, fields))
        for event in _nested(record.value, "resourceLogs", "scopeLogs", "logRecords"):
            yield from _event(event, record.where, fields, opened)
            if len(opened) > _MOST_OPEN:
                _, oldest = opened.popitem(last=False)
                yield LostEntry(oldest.where, "no_answer", "no event gen_ai.choice came.")
    for left in opened.values():
        yield LostEntry(left.where, "no_answer", "no event gen_ai.choice came.")


def _nested(value: Mapping[str, Any], *keys: str) -> Iterator[Mapping[str, Any]]:
    """Yield the innermost objects of nested lists; each level of the nesting has its own key."""
    for each in objects(value.get(keys[0])):
        yield from _nested(each, *keys[1:]) if keys[1:] else (each,)


@dataclass(frozen=True)
class _Source:
    """A span, or an event that describes a whole call."""

    held: Mapping[str, Any]
    where: str
    fields: Fields

    @property
    def attributes(self) -> dict[str, Any]:
        """Return the attributes as plain data."""
        return _attributes(self.held.get("attributes"))


@dataclass
class _Events:
    """Messages of a call whose answer has not arrived yet."""

    where: str
    messages: list[dict[str, Any]] = field(default_factory=list)


def _attributes(value: Any) -> dict[str, Any]:
    """Convert attributes from a list of keys and values to a dict."""
    return {str(each.get("key")): _plain(each.get("value")) for each in objects(value)}


def _plain(value: Any) -> Any:
    """Return an `AnyValue` of OTLP as plain data."""
    if not isinstance(value, Mapping):
        return value
    for key, held in value.items():
        if key == "kvlistValue":
            return _attributes(mapping(held).get("values"))
        if key == "arrayValue":
            return [_plain(each) for each in objects(mapping(held).get("values"))]
        if key == "intValue":
            return int(held) if str(held).lstrip("-").isdigit() else held
        return held
    return None


def _guarded(source: _Source) -> Iterator[Entry]:
    """Yield the calls and scores of a span, or a lost entry if the span cannot be used."""
    try:
        yield from _span(source)
    except DataError as error:
        yield LostEntry(source.where, "unsupported", str(error))


def _span(source: _Source) -> Iterator[Entry]:
    attributes = source.attributes
    log_events = [
        _attributes(each.get("attributes")) | {"event.name": str(each.get("name"))}
        for each in objects(source.held.get("events"))
    ]
    for each in (one for one in log_events if one["event.name"] == _RESULT):
        yield _result(each, source.held, source.where)
    details: dict[str, Any] = next((one for one in log_events if one["event.name"] == _DETAILS), {})
    collected = _Events(source.where)
    choices = [said for one in log_events if (said := _collect(one, one, collected)) is not None]
    found = content_of(attributes | details, source.where) or Content(collected.messages, choices)
    if not found.asked and not found.answers:
        is_call = attributes.get("gen_ai.operation.name") in _OPERATIONS
        is_call |= attributes.get("openinference.span.kind") == "LLM"
        reason = "the span holds no messages: the capture of contents was off, or events hold them."
        yield LostEntry(source.where, "no_answer", reason) if is_call else LostEntry(source.where, "no_call")
        return
    yield from _calls(source, attributes | details, found)


@dataclass(frozen=True)
class Content:
    """Messages of a call, as its attributes hold them."""

    asked: Any
    answers: list[Any]
    system: Any = None
    tools: Any = None


def _calls(source: _Source, attributes: Mapping[str, Any], found: Content) -> Iterator[Entry]:
    """Yield a call for each answer, or a lost entry if the request or the answer is missing."""
    held, where, fields = source.held, source.where, source.fields
    answers = [action for each in found.answers for action in answers_in(each, where)]
    if not answers or not found.asked:
        lacks = "answer" if found.asked else "request"
        yield LostEntry(where, "no_answer", f"the call has no {lacks}.")
        return
    finish = attributes.get("gen_ai.response.finish_reasons")
    if isinstance(finish, list) and any(map(is_cut, finish)) and len(answers) == 1:
        answers = [replace(answers[0], ended=False)]
    messages = messages_of(found.asked, where, found.system)
    session = first(attributes, *([fields.session] if fields.session else _SESSION))
    if fields.session and session is None:
        session = at_path(held, fields.session)  # such as traceId
    for index, answer in enumerate(answers):
        yield Call(
            where,
            messages,
            answer,
            ids_of(held.get("spanId"), attributes.get("gen_ai.response.id")),
            choice=index,
            session=text_id(session),
            trace=_trace(held),
            time=seconds(_number(first(held, "startTimeUnixNano", "timeUnixNano", "observedTimeUnixNano"))),
            tools=tools_of(found.tools, where),
            model=str(
                first(attributes, "gen_ai.response.model", "gen_ai.request.model", "llm.model_name") or ""
            ),
            scores=named_score(attributes, fields),
            task=None if fields.task is None else text_id(at_path(attributes, fields.task)),
        )


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdigit() else value


def _trace(held: Mapping[str, Any]) -> str | None:
    """Return the id of a trace; None if it is missing or all zeros."""
    found = text_id(held.get("traceId"))
    return found if found and found.strip("0") else None


def _result(attributes: Mapping[str, Any], held: Mapping[str, Any], where: str) -> Entry:
    """Return the score of an evaluation, for the response that it names or else for its span or trace."""
    value, label = (attributes.get(f"gen_ai.evaluation.score.{key}") for key in ("value", "label"))
    name = text_id(attributes.get("gen_ai.evaluation.name")) or "evaluation"
    found = score_of(name, value if label is None or score_value(value) is not None else label)
    of = text_id(first(attributes, "gen_ai.response.id") or first(held, "spanId", "traceId"))
    return of_another(found, of, where)


def _event(
    event: Mapping[str, Any], where: str, fields: Fields, opened: OrderedDict[str, _Events]
) -> Iterator[Entry]:
    """Yield the call or the score that a log record completes."""
    attributes, body = _attributes(event.get("attributes")), _plain(event.get("body"))
    name = str(first(event, "eventName") or attributes.get("event.name"))
    attributes["event.name"] = name
    if name == _RESULT:
        yield _result(attributes, event, where)
        return
    if name == _DETAILS:
        yield from _guarded(_Source(event, where, fields))
        return
    if name not in (*_ROLES, _CHOICE):
        yield LostEntry(where, "no_call")
        return
    key = f"{event.get('traceId')} {event.get('spanId')}"
    waiting = opened.setdefault(key, _Events(where))
    said = _collect(attributes, mapping(body), waiting)
    if said is not None:
        try:
            yield from _calls(_Source(event, where, fields), attributes, Content(waiting.messages, [said]))
        except DataError as error:
            yield LostEntry(where, "unsupported", str(error))
        if mapping(body).get("index") in (0, None):
            del opened[key]


def _collect(attributes: Mapping[str, Any], body: Mapping[str, Any], into: _Events) -> Any:
    """Add the message of an event to its call. If the event is a choice, return it as a response instead."""
    name = str(attributes.get("event.name"))
    body = mapping(attributes.get("gen_ai.event.content")) or body
    if name == _CHOICE:
        return {"choices": [{**body, "message": {"role": "assistant", **mapping(body.get("message"))}}]}
    if name in _ROLES:
        message = {
            key: value for key, value in body.items() if key in ("role", "content", "tool_calls", "name")
        }
        tool = {"tool_call_id": body.get("id")} if _ROLES[name] == "tool" else {}
        into.messages.append({"role": _ROLES[name], **message, **tool})
    return None


def content_of(attributes: Mapping[str, Any], where: str) -> Content | None:
    """Return the messages in the attributes of a call; None if the attributes hold no messages."""
    if (asked := first(attributes, "gen_ai.input.messages")) is not None:
        answers = unpacked(attributes.get("gen_ai.output.messages"), where)
        given = [
            {"choices": [{"message": each, "finish_reason": mapping(each).get("finish_reason")}]}
            for each in (answers if isinstance(answers, list) else [])
        ]
        system = unpacked(attributes.get("gen_ai.system_instructions"), where)
        return Content(asked, given, system, attributes.get("gen_ai.tool.definitions"))
    for asking, saying, inner in (
        ("llm.input_messages", "llm.output_messages", "message"),
        ("gen_ai.prompt", "gen_ai.completion", ""),
    ):
        if asked := _flat(attributes, asking, inner):
            tools = [
                mapping(each.get("tool", each)).get("json_schema", each)
                for each in _listed(attributes, "llm.tools")
            ]
            said = _answers(_flat(attributes, saying, inner), attributes.get("llm.finish_reason"))
            return Content(asked, said, None, tools)
    return None


def _answers(said: list[dict[str, Any]], first_reason: Any) -> list[dict[str, Any]]:
    """Return the answers in the output messages of flat attributes, in the format of the responses API.

    OpenLLMetry gives each choice its finish reason. OpenInference gives a response of choices the reason of its first
    choice. A message without either is an item of the answer before it, as in the responses API. So is a message with a
    reason of Anthropic.
    """
    answers: list[dict[str, Any]] = []
    for message in said:
        reason = message.pop("finish_reason", None)
        said_why = reason or first_reason
        if not answers or (said_why and said_why not in _WITHOUT_CHOICES):
            reason = reason or (None if answers else first_reason)
            answers.append({"output": [], "incomplete_details": {"reason": reason}})
        answers[-1]["output"].append(message)
    return answers


def _flat(attributes: Mapping[str, Any], prefix: str, inner: str) -> list[dict[str, Any]]:
    """Return the messages in numbered attributes, such as `gen_ai.prompt.0.role`, in the format of chat completions."""
    found = []
    for each in _listed(attributes, prefix):
        message = dict(mapping(each.get(inner)) if inner else each)
        if message.get("role") == "thinking":  # a thinking block of Anthropic, in OpenLLMetry
            message |= {"role": "assistant", "content": "", "reasoning_content": message.get("content")}
        parts = [
            mapping(part.get("message_content", part)) for part in _numbered(message.pop("contents", None))
        ]
        if parts:
            message["content"] = [{"type": part.get("type", "text"), **part} for part in parts]
        calls = [mapping(call.get("tool_call", call)) for call in _numbered(message.pop("tool_calls", None))]
        if calls:
            message["tool_calls"] = [
                {"id": call.get("id"), "function": dict(mapping(call.get("function")) or call)}
                for call in calls
            ]
        part_of_answer = {"continues": True} if message.get("role") == "assistant" else {}
        found.append(message | part_of_answer)  # in the responses API each item is a message
    return found


def _listed(attributes: Mapping[str, Any], prefix: str) -> list[Mapping[str, Any]]:
    """Collect attributes such as `prefix.0.role` into objects, in the order of their numbers."""
    tree: dict[str, Any] = {}
    for name in (each for each in attributes if each.startswith(f"{prefix}.")):
        node = tree
        *steps, last = name[len(prefix) + 1 :].split(".")
        for step in steps[:10]:
            inner = node.setdefault(step, {})
            node = inner if isinstance(inner, dict) else node
        node[last] = attributes[name]
    return _numbered(tree)


def _numbered(tree: Any) -> list[Mapping[str, Any]]:
    """Return the values under the numeric keys of an object, in numeric order."""
    held = tree if isinstance(tree, Mapping) else {}
    return [mapping(held[key]) for key in sorted((each for each in held if each.isdigit()), key=int)]
