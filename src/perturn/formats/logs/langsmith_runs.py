"""Read runs of LangSmith. Runs of type `llm` are calls of a model.

A record is a run of the SDK, the API or a bulk export (docs.langchain.com/langsmith/run-data-format). Its keys are
`id`, `run_type`, `inputs`, `outputs`, `error`, `trace_id`, `start_time`, `extra` and `feedback_stats`. Bulk exports are
Parquet files with objects as JSON text. Runs inside `child_runs` are read too.

- `inputs` and `outputs` come from `wrap_openai` and `wrap_anthropic` (bodies of the API), from LangChain (messages in
  the format of `dumpd`, and `generations`), or from a traced function that takes messages.
- The session is the thread: `session_id`, `thread_id` or `conversation_id` in `extra.metadata`
  (docs.langchain.com/langsmith/threads). The field `session_id` of a run is its project, and is not read.
- `feedback_stats` holds an average or the counts of categories for each key, which are read as a score. A record of
  feedback (`run_id`, `key`, `score`) is a score too. The feedback of a root run belongs to its trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from perturn.formats.logs.request_logs import answers_in, named_score, task_in

_THREADS = ("session_id", "thread_id", "conversation_id")


def is_langsmith(record: Mapping[str, Any]) -> bool:
    """Return whether a record is a run, or feedback on one."""
    return "run_type" in record or ("run_id" in record and "key" in record)


def read_langsmith(records: Iterator[Record], fields: Fields) -> Iterator[Entry]:
    """Yield the calls and scores of runs."""
    for record in records:
        if isinstance(record.value, DataError):
            yield LostEntry(record.where, "broken", str(record.value))
        elif "run_id" in record.value and "run_type" not in record.value:
            yield from _feedback(record.value, record.where)
        else:
            yield from _run(record.value, record.where, fields)


def _feedback(record: Mapping[str, Any], where: str) -> Iterator[Entry]:
    """Yield the score of a record of feedback."""
    found = score_of(text_id(record.get("key")) or "feedback", first(record, "score", "value"))
    yield of_another(found, text_id(record.get("run_id")), where)


def _run(run: Mapping[str, Any], where: str, fields: Fields) -> Iterator[Entry]:
    """Yield the calls and scores of a run and of its child runs."""
    for child in objects(run.get("child_runs")):
        yield from _run(child, where, fields)
    of = text_id(run.get("id"))
    for key, stats in mapping(run.get("feedback_stats")).items():
        if (held := _rating(mapping(stats))) is not None:
            yield of_another(score_of(text_id(key) or "feedback", held), of, where)
    if run.get("run_type") != "llm":
        yield LostEntry(where, "no_call")
        return
    try:
        yield from _calls(run, where, fields)
    except DataError as error:
        yield LostEntry(where, "unsupported", str(error))


def _rating(stats: Mapping[str, Any]) -> Any:
    """Return the average of feedback, or the mean of its categories; the names of the categories if one is no score."""
    counts = mapping(stats.get("values"))
    if stats.get("avg") is not None or not counts:
        return stats.get("avg")
    scores = [(score_value(each), score_value(count) or 0.0) for each, count in counts.items()]
    total = sum(count for _, count in scores)
    if total <= 0 or any(score is None for score, _ in scores):
        return ", ".join(map(str, counts))
    return sum((score or 0.0) * count for score, count in scores) / total


def _calls(run: Mapping[str, Any], where: str, fields: Fields) -> Iterator[Entry]:
    """Yield a call for each answer of a run of type `llm`."""
    inputs, outputs = mapping(run.get("inputs")), mapping(run.get("outputs"))
    asked = first(inputs, "messages", "input", "prompts", "prompt")
    answers = (
        [] if run.get("error") else [action for said in _said(outputs) for action in answers_in(said, where)]
    )
    if asked is None or not answers:
        error = f" ({run['error']!s:.100})" if run.get("error") else ""
        yield LostEntry(
            where, "no_answer", f"the run has no {'input' if asked is None else 'answer'}{error}."
        )
        return
    extra = mapping(run.get("extra"))
    metadata = mapping(extra.get("metadata"))
    invoked = mapping(extra.get("invocation_params"))
    messages = messages_of(asked, where, first(inputs, "system", "instructions"))
    session = at_path(run, fields.session) if fields.session else first(metadata, *_THREADS)
    for index, answer in enumerate(answers):
        yield Call(
            where,
            messages,
            answer,
            ids_of(run.get("id")),
            choice=index,
            session=text_id(session),
            trace=text_id(run.get("trace_id")),
            time=seconds(run.get("start_time")),
            tools=tools_of(first(inputs, "tools") or invoked.get("tools"), where),
            model=str(
                first(metadata, "ls_model_name") or first(inputs, "model") or first(invoked, "model") or ""
            ),
            scores=named_score(run, fields),
            task=task_in(run, fields),
        )


def _said(outputs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the response bodies in the outputs of a run, in the formats that `answers_in` reads."""
    generations = unpacked(outputs.get("generations"), "")
    if isinstance(generations, list):
        flat = (one for each in generations for one in (each if isinstance(each, list) else [each]))
        for each in map(mapping, flat):
            reason = mapping(each.get("generation_info")).get("finish_reason")
            said = (
                each["message"]
                if each.get("message")
                else {"role": "assistant", "content": each.get("text") or ""}
            )
            yield {"choices": [{"message": said, "finish_reason": reason}]}
    elif outputs.get("choices") or "role" in outputs or isinstance(outputs.get("output"), list):
        yield outputs
    elif (said := first(outputs, "messages", "message", "output", "content", "text")) is not None:
        yield {"output": said} if isinstance(said, list) else said
