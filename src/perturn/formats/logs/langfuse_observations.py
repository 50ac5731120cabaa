"""Read exports of Langfuse. Observations of type `GENERATION` are calls of a model.

Keys are in camel case (API, exports of the UI) or in snake case (exports to blob storage). A record is one of:

- an observation: `id`, `type`, `traceId`, `startTime`, `model`, `input`, `output`, `level` (API reference, and
  langfuse.com/docs/api-and-data-platform/features/blob-storage-export-fields). Enriched exports also hold `session_id`;
- a trace: `id`, `timestamp`, `sessionId`, and in a download also `observations` and `scores`;
- a score: `name`, `value`, `dataType`, and the `observationId`, `traceId` or `sessionId` of the scored object. A
  boolean score is 1 or 0. A categorical score is read if its text is a number or means thumbs up or down, or if its
  configuration (`configId`) maps the text to a number.

`input` and `output` are in the client's format: messages, request or response bodies of an API, or text. Each may be
JSON text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from perturn.errors import DataError
from perturn.formats.json_stream import Record
from perturn.formats.logs.log_entries import (
    Call,
    Entry,
    Fields,
    LostEntry,
    Score,
    Trace,
    of_another,
    score_of,
)
from perturn.formats.logs.log_values import (
    at_path,
    first,
    ids_of,
    mapping,
    named_scores,
    objects,
    score_value,
    seconds,
    text_id,
)
from perturn.formats.logs.provider_messages import messages_of, parsed, tools_of
from perturn.formats.logs.request_logs import answers_in, named_score, task_in

_TYPES = {
    "SPAN",
    "EVENT",
    "GENERATION",
    "AGENT",
    "TOOL",
    "CHAIN",
    "RETRIEVER",
    "EVALUATOR",
    "EMBEDDING",
    "GUARDRAIL",
}
_TRACE_ID, _SESSION_ID = ("traceId", "trace_id"), ("sessionId", "session_id")
_OF_TRACES = {
    "htmlPath",
    "observations",
    "bookmarked",
    "public",
    "project_id",
    "projectId",
    "environment",
    "userId",
}
"""Keys that only a trace has. A record is a trace if it has a time, an id and one of these keys."""


def is_langfuse(record: Mapping[str, Any]) -> bool:
    """Return whether a record is an observation, a trace or a score."""
    return _is_observation(record) or _is_score(record) or _is_trace(record)


def _is_observation(record: Mapping[str, Any]) -> bool:
    return str(record.get("type")) in _TYPES and first(record, *_TRACE_ID, "id") is not None


def _is_score(record: Mapping[str, Any]) -> bool:
    typed = first(record, "dataType", "data_type") is not None
    return typed and not {"name", "value"}.isdisjoint(record)  # Parquet may hold a null as the name


def _is_trace(record: Mapping[str, Any]) -> bool:
    is_trace = "timestamp" in record and "id" in record and bool(record.keys() & _OF_TRACES)
    return is_trace or ("trace" in record and "observations" in record)


def read_langfuse(records: Iterator[Record], fields: Fields) -> Iterator[Entry]:
    """Yield the calls, scores and traces of an export."""
    for record in records:
        if isinstance(record.value, DataError):
            yield LostEntry(record.where, "broken", str(record.value))
            continue
        yield from _entries(record.value, record.where, fields)


def _entries(held: Mapping[str, Any], where: str, fields: Fields) -> Iterator[Entry]:
    """Yield the entries of a record and of the records inside it."""
    if _is_score(held):
        yield from _score(held, where)
        return
    if _is_observation(held):
        yield from _scores_within(held)
        yield from _observation(held, where, fields)
        return
    held = {**mapping(held.get("trace")), **held}  # a download of the UI holds its trace under `trace`
    of, session = text_id(held.get("id")), text_id(first(held, *_SESSION_ID))
    if of is not None and session is not None:
        yield Trace(of, session)
    yield from _scores_within(held)
    inner = objects(held.get("observations"))
    for each in inner:
        yield from _entries({"traceId": of, **each}, where, fields)
    if not inner:
        yield LostEntry(where, "no_call")


def _score(held: Mapping[str, Any], where: str) -> Iterator[Entry]:
    """Yield a score."""
    value, said = held.get("value"), first(held, "stringValue", "string_value")
    if first(held, "dataType", "data_type") == "CATEGORICAL" and said is not None:
        is_mapped = score_value(said) is None and first(held, "configId", "config_id") is not None
        value = value if is_mapped else said
    of = text_id(first(held, "observationId", "observation_id", *_TRACE_ID, *_SESSION_ID))
    found = score_of(text_id(held.get("name")) or "score", said if value is None else value)
    yield of_another(found, of, where)


def _scores_within(held: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield the scores inside a trace or an observation, given as records of scores or as values by name."""
    of = text_id(held.get("id"))
    records = [one for one in objects(held.get("scores")) if _is_score(one)]
    for each in records:
        yield from _score({"traceId": of, **each}, "")
    if not records and of is not None:
        for name, value in named_scores(held, ("scores",)):
            yield Score(name, value, of)


def _observation(held: Mapping[str, Any], where: str, fields: Fields) -> Iterator[Entry]:
    """Yield the calls of an observation."""
    if held["type"] != "GENERATION":
        yield LostEntry(where, "no_call")
        return
    try:
        yield from _calls(held, where, fields)
    except DataError as error:
        yield LostEntry(where, "unsupported", str(error))


def _calls(held: Mapping[str, Any], where: str, fields: Fields) -> Iterator[Entry]:
    """Yield a call for each answer of a generation."""
    given, output = parsed(held.get("input"), where), held.get("output")
    failed = held.get("level") == "ERROR"
    answers = [] if failed or output in (None, "", [], {}) else list(answers_in(output, where))
    if given in (None, "", [], {}) or not answers:
        said = first(held, "statusMessage", "status_message")
        lacks = "answer" if given else "input"
        yield LostEntry(
            where, "no_answer", f"the generation has no {lacks}{f' ({said!s:.100})' if said else ''}."
        )
        return
    body = given if isinstance(given, Mapping) else {}
    asked = first(body, "messages", "input", "prompt") if body and "role" not in body else given
    parameters = mapping(first(held, "modelParameters", "model_parameters"))
    session = at_path(held, fields.session) if fields.session else first(held, *_SESSION_ID)
    for index, answer in enumerate(answers):
        yield Call(
            where,
            messages_of(given if asked is None else asked, where, first(body, "system", "instructions")),
            answer,
            ids_of(held.get("id")),
            choice=index,
            session=text_id(session),
            trace=text_id(first(held, *_TRACE_ID)),
            time=seconds(first(held, "startTime", "start_time")),
            tools=tools_of(first(body, "tools") or first(parameters, "tools"), where),
            model=str(first(held, "model", "providedModelName", "provided_model_name") or ""),
            scores=named_score(held, fields),
            task=task_in(held, fields),
        )
