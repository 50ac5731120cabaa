"""Read logs of requests and responses, from proxies, LiteLLM, and OpenAI's stored completions.

A record holds the body of a request and the body of its response. Both belong to the API chat completions or responses
(OpenAI), or to messages (Anthropic). Known layouts:

- `request` and `response`, or similar keys such as `request_body` and `response_body`. Each holds the body, its JSON
  text, or an object with the body under `body`. Other keys in such an object, such as headers, are never read.
- LiteLLM's `StandardLoggingPayload` (docs.litellm.ai/docs/proxy/logging_spec), alone or under
  `standard_logging_object`: `messages`, `response`, `model_parameters`, `trace_id`, `startTime`, `status`.
- A stored chat completion of OpenAI (API reference, "List Chat Completions") with its messages ("Get chat messages")
  added under `messages`.

A request of the responses API may name the response that it continues (`previous_response_id`). It then continues the
conversation of that response, which must come earlier in the log.

A record without a request may hold a score and an id. The score then belongs to the call, trace or session with that
id.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from perturn.errors import DataError
from perturn.formats.json_stream import Record
from perturn.formats.logs.log_entries import Call, Entry, Fields, LostEntry, Score, of_another, score_of
from perturn.formats.logs.log_values import (
    at_path,
    first,
    ids_of,
    mapping,
    named_scores,
    score_value,
    seconds,
    text_id,
    unpacked,
)
from perturn.formats.logs.provider_messages import answer_of, is_known, messages_of, parsed, tools_of
from perturn.formats.logs.sampled_tokens import with_choice_tokens
from perturn.formats.logs.streamed_answers import joined
from perturn.types import Action

_REQUESTS = ("request", "request_body", "requestBody", "req", "proxy_server_request")
_RESPONSES = ("response", "response_body", "responseBody", "resp", "completion")
_BODIES = ("body", "json", "data", "postData.text", "content.text")
"""Paths of the body in a request or response that also holds a URL and headers. The last two paths are for HAR files.
"""
_OF_BODIES = {
    *("finish_reason", "function_call", "stop_reason", "stopReason", "tool_calls"),
    *("candidates", "error", "input_tokens", "model", "object", "usage"),
    *("code", "detail", "errors", "generated_text", "generation_id", "message"),
}
"""Keys of the body of an API's response. JSON text with none of them is an answer."""
_JSON_ANSWER = "a response that is JSON text without the keys of a body is read as the answer."
_SCORED = ("feedback", "reward", "rating", "score", "scores", "thumbs", "label")
"""Fields of a record, or of its metadata, that are read as scores."""
_SESSIONS = (
    "session_id",
    "sessionId",
    "session",
    "thread_id",
    "threadId",
    "conversation_id",
    "conversationId",
)
_TRACES = ("trace_id", "traceId")
_IDS = ("id", "call_id", "request_id", "requestId", "response_id", "completion_id", "generation_id")
_TIMES = (
    "startedDateTime",  # of HAR files, in which `time` is the duration
    "startTime",
    "start_time",
    "request_created_at",
    "created_at",
    "createdAt",
    "timestamp",
    "time",
    "created",
)
_Stored = dict[str, tuple[str | None, list[Any]]]
"""Conversations of the responses API: id of a response -> (id of the previous response, items after the previous
response, including this response's items)."""
_CUT = ("length", "max_tokens", "max_output_tokens", "model_context_window_exceeded")
"""Stop reasons of APIs that say that a limit cut the answer."""


def is_request_log(record: Mapping[str, Any]) -> bool:
    """Return whether a record holds a request, a response, or the score of a call."""
    held = _payload(record)
    if any(mapping(held.get(name)) for name in _REQUESTS) or isinstance(
        unpacked(held.get("messages"), ""), list
    ):
        return any(name in held for name in (*_RESPONSES, "choices")) or bool(_request(held))
    return bool(ids_of(*(held.get(name) for name in (*_IDS, *_TRACES, *_SESSIONS)))) and any(
        name in held for name in _SCORED
    )


def read_request_logs(records: Iterator[Record], fields: Fields) -> Iterator[Entry]:
    """Yield the calls and scores of a log of requests and responses."""
    stored: _Stored = {}
    for record in records:
        if isinstance(record.value, DataError):
            yield LostEntry(record.where, "broken", str(record.value))
            continue
        try:
            yield from _entries(_payload(record.value), record.where, fields, stored)
        except DataError as error:
            yield LostEntry(record.where, "unsupported", str(error))


def _payload(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return LiteLLM's payload from a record; any other record unchanged."""
    return mapping(record.get("standard_logging_object")) or record


def _entries(record: Mapping[str, Any], where: str, fields: Fields, stored: _Stored) -> Iterator[Entry]:
    """Yield a call for each choice of a record's response. A record without a request yields its scores.

    Choices of a session share an episode, whose rewards are added, so only the first choice has the record's scores.
    Other choices are episodes of their own, and each has the scores.
    """
    request = _request(record)
    scores = tuple(scores_in(record, fields))
    if not request:
        ids = ids_of(*(record.get(name) for name in (*_IDS[1:], _IDS[0], *_TRACES, *_SESSIONS)))
        if not scores or not ids:
            yield LostEntry(where, "no_call")
        for one in scores if ids else ():
            yield of_another(one, ids[0], where)
        return
    metadata = mapping(record.get("metadata"))
    requested = mapping(request.get("metadata"))
    session = session_in(record, fields, metadata, requested)
    trace = next(iter(ids_of(*(first(each, *_TRACES) for each in (record, metadata, requested)))), None)
    before = _before(request, where, stored)
    response, wrapper = _response(record)
    body = response if isinstance(response, Mapping) else {}
    answers = list(answers_in(response, where)) if _succeeded(response, record, wrapper) else []
    if not answers:
        error = first(record, "error_str", "error") or body.get("error")
        said = f"the call has no answer{f' ({error!s:.100})' if error else ''}."
        if response is None and request is record and not error:
            said = "the record has messages and no response; for a whole conversation, set --format conversations."
        yield LostEntry(where, "no_answer", said)
        for one, of in ((one, session or trace or "") for one in scores if one.value is not None):
            yield Score(one.name, one.value, of)  # of the last call of its session
        return
    system = first(request, "system", "instructions")
    asked = first(request, "messages", "input")
    fresh = _items(asked, where) if _is_of_responses(response) else []
    messages = messages_of(
        asked if before is None else [*_conversation(before, stored), *fresh], where, system
    )
    tools = tools_of(first(request, "tools") or mapping(record.get("model_parameters")).get("tools"), where)
    identity = text_id(body.get("id"))
    if fresh and identity is not None and identity not in stored:  # so that no chain is circular
        stored[identity] = before, [*fresh, *body["output"]]
    is_shared = (session or trace) is not None
    for index, answer in enumerate(answers):
        yield Call(
            where,
            messages,
            answer,
            ids_of(*(record.get(name) for name in _IDS), body.get("id")),
            choice=index,
            session=session,
            trace=trace,
            time=_time(record, body),
            tools=tools,
            model=str(first(body, "model") or first(request, "model") or record.get("model") or ""),
            scores=() if is_shared and index else scores,
            task=task_in(record, fields),
            note="" if unpacked(response, "") is response else _JSON_ANSWER,
        )


def _time(record: Mapping[str, Any], body: Mapping[str, Any]) -> float | None:
    """Return the start of a call, in seconds since 1970; None if neither its record nor its response has it."""
    times = (*(record.get(name) for name in _TIMES), body.get("created"), body.get("created_at"))
    return next((found for time in times if (found := seconds(time)) is not None), None)


def _before(request: Mapping[str, Any], where: str, stored: _Stored) -> str | None:
    """Return the id of the response that a request continues; None if the request holds all messages.

    Raises:
        DataError: If earlier entries of the log do not hold the continued conversation.
    """
    named = first(request, "previous_response_id", "conversation")
    before = text_id(request.get("previous_response_id"))
    if named is not None and (before not in stored or request.get("conversation")):
        raise DataError(
            f"{where}: the request continues {named!s:.60}, which the provider stores and no earlier entry of the log "
            "holds."
        )
    return before


def _conversation(response: str | None, stored: _Stored) -> list[Any]:
    """Return the items of a conversation up to and including a response, without instructions, as in the API."""
    parts = []
    while response is not None:
        response, items = stored[response]
        parts.append(items)
    return [item for part in reversed(parts) for item in part]


def _is_of_responses(response: Any) -> bool:
    return isinstance(mapping(response).get("output"), list)


def _items(asked: Any, where: str) -> list[Any]:
    """Return the input of a request of the responses API as a list of items."""
    asked = parsed(asked, where)
    return asked if isinstance(asked, list) else [{"role": "user", "content": asked}]


def _request(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body of a request; empty if the record holds no request."""
    for name in _REQUESTS:
        body = mapping(record.get(name))
        body = next((inner for path in _BODIES if (inner := mapping(at_path(body, path)))), body)
        if first(body, "messages", "input") is not None:
            return body
    return record if isinstance(unpacked(record.get("messages"), ""), list) else {}


def _response(record: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return the body of a response, and the object with the response's status; the object is empty if there is none.

    The record of a stored completion is the response itself.
    """
    for name in _RESPONSES:
        given = record.get(name)
        if (found := joined(given)) not in (None, "", {}, []):
            inner = _body_in(mapping(found))
            response = found if inner is None else joined(inner)
            is_json_text = isinstance(given, str) and found == unpacked(given, "")
            if is_json_text and not (_is_body(found) or _is_body(response)):
                return given, {}
            return response, mapping(found)
    return (record if isinstance(record.get("choices"), list) else None), {}


def _body_in(response: Mapping[str, Any]) -> Any:
    """Return the body of a response that also holds a URL and headers; None if it holds none.

    Raises:
        DataError: If the body of a call that did not fail is in base64, as in HAR files, and is no text.
    """
    found = next((held for path in _BODIES if (held := at_path(response, path))), None)
    if not isinstance(found, str) or at_path(response, "content.encoding") != "base64":
        return found
    try:
        return base64.b64decode(found).decode()
    except ValueError as error:
        if _failed(response):
            return found
        raise DataError(f"response.content.text: expected a text in base64 ({error}).") from error


def _is_body(held: Any) -> bool:
    """Return whether a value is the body of an API's response, also if the API is unknown."""
    parts = held if isinstance(held, list) else [held]
    return is_known(held) or any(mapping(each).keys() & _OF_BODIES for each in parts)


def _succeeded(response: Any, *reports: Mapping[str, Any]) -> bool:
    """Return whether a call has a response, and neither the response nor one of the reports says that it failed."""
    return bool(response) and not mapping(response).get("error") and not any(map(_failed, reports))


def _failed(report: Mapping[str, Any]) -> bool:
    """Return whether the status in a record or response is a failure. The status may be a number in a text."""
    status = first(report, "status_code", "statusCode", "response_status", "status")
    return status in ("failure", "failed", "error") or (score_value(status) or 0.0) >= 400


def answers_in(response: Any, where: str) -> Iterator[Action]:
    """Yield the answers of a response, one for each choice. Skip empty answers.

    Args:
        response: The body of a response of chat completions, responses or messages; or an assistant message, its items,
            or text.
        where: Location of the response, for error messages.

    Raises:
        DataError: If an answer has an unknown format, or holds something that training cannot use.
    """
    response = parsed(response, where)
    body = response if isinstance(response, Mapping) else {}
    choices = body.get("choices")
    if isinstance(choices, list):
        given = [(mapping(each).get("message"), mapping(each).get("finish_reason"), each) for each in choices]
    elif isinstance(body.get("output"), list):
        given = [(body["output"], mapping(body.get("incomplete_details")).get("reason"), None)]
    else:
        given = [(response, first(body, "stop_reason", "finish_reason"), None)]
    for said, reason, choice in given:
        if said is not None and (action := answer_of(said, f"{where}: answer")) is not None:
            action = with_choice_tokens(action, mapping(choice), f"{where}: answer")
            yield replace(action, ended=False) if is_cut(reason) else action


def is_cut(reason: Any) -> bool:
    """Return whether a stop reason says that a limit cut the answer. Gemini's reasons are in capital letters."""
    return str(reason).lower() in _CUT


def scores_in(record: Mapping[str, Any], fields: Fields) -> Iterator[Score]:
    """Yield the scores of a record's own call, from the field that the user names or from the usual fields."""
    if named := named_score(record, fields):
        yield from named
        return
    for holder in (record, mapping(record.get("metadata"))):
        for name, value in named_scores(holder, _SCORED):
            yield Score(name, value, "")


def named_score(record: Mapping[str, Any], fields: Fields) -> tuple[Score, ...]:
    """Return the score in the field that the user names; empty if the field is empty or none is named."""
    held = None if fields.score is None else at_path(record, fields.score)
    return () if fields.score is None or held in (None, "") else (score_of(fields.score, held),)


def session_in(record: Mapping[str, Any], fields: Fields, *metadata: Mapping[str, Any]) -> str | None:
    """Return the session id of a record, from the named field, or from usual fields of the record or its metadata."""
    if fields.session is not None:
        return text_id(at_path(record, fields.session))
    return next(iter(ids_of(*(first(each, *_SESSIONS) for each in (record, *metadata)))), None)


def task_in(record: Mapping[str, Any], fields: Fields) -> str | None:
    """Return the task in the field of a record that the user names; None if the field is empty or none is named."""
    return None if fields.task is None else text_id(at_path(record, fields.task))
