"""Read files of logs record by record. The first records tell the format of a file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, islice

from perturn.errors import DataError, did_you_mean
from perturn.formats.column_names import without_filled
from perturn.formats.json_stream import Record
from perturn.formats.logs.langfuse_observations import is_langfuse, read_langfuse
from perturn.formats.logs.langsmith_runs import is_langsmith, read_langsmith
from perturn.formats.logs.log_entries import Call, Entry, Fields, LogFormat, LostEntry, Score
from perturn.formats.logs.log_values import mapping, unpacked
from perturn.formats.logs.otel_spans import is_otel, read_otel
from perturn.formats.logs.request_logs import is_request_log, read_request_logs
from perturn.formats.rollouts.agent_lightning import is_agent_lightning, read_agent_lightning
from perturn.formats.rollouts.art_trajectories import is_art, read_art
from perturn.formats.rollouts.scored_conversations import is_conversation, read_conversations
from perturn.formats.rollouts.skyrl_rollouts import is_skyrl, read_skyrl
from perturn.formats.rollouts.trl_completions import is_trl, read_trl
from perturn.formats.rollouts.verifiers_results import is_verifiers, read_verifiers
from perturn.formats.rollouts.verl_rollouts import is_verl, read_verl
from perturn.formats.row_sources import Location, open_source
from perturn.formats.unreadable_files import keys_of

FORMATS: Mapping[str, LogFormat] = {
    "otel": LogFormat(
        "OpenTelemetry: spans and events, as the OTLP file exporter writes them", is_otel, read_otel
    ),
    "langsmith": LogFormat("LangSmith: runs and feedback", is_langsmith, read_langsmith),
    "langfuse": LogFormat("Langfuse: observations, traces and scores", is_langfuse, read_langfuse),
    "verifiers": LogFormat("verifiers: results.jsonl and traces.jsonl", is_verifiers, read_verifiers),
    "verl": LogFormat("verl: rollout_data_dir, and outputs of agent loops", is_verl, read_verl),
    "skyrl": LogFormat("SkyRL: dumped evaluations, and outputs of generators", is_skyrl, read_skyrl),
    "trl": LogFormat("TRL: logged completions, and outputs of rollout functions", is_trl, read_trl),
    "art": LogFormat("ART: trajectories and groups", is_art, read_art),
    "agent-lightning": LogFormat(
        "agent-lightning: events, spans and triplets", is_agent_lightning, read_agent_lightning
    ),
    "conversations": LogFormat(
        "conversations with a reward: messages, reward and task", is_conversation, read_conversations
    ),
    "requests": LogFormat(
        "requests and responses of the APIs of OpenAI and Anthropic, as proxies and LiteLLM log them",
        is_request_log,
        read_request_logs,
    ),
}
"""Log formats, in the order in which they are tried."""

_LOOKED_AT = 100
"""Number of first records that are examined to recognise the format."""
_ENVELOPES = ("data", "runs", "items", "logs", "log.entries")
"""Keys under which a response of an API, or a HAR file, holds a list of records."""
_REDACTED = "redacted-by-litellm"
"""Text that LiteLLM stores with `turn_off_message_logging`, itself or at a tracing service."""
_CUT = re.compile(r"\.\.\. \(litellm_truncated (?:skipped )?\d+ chars")
"""Text that LiteLLM puts in place of the middle of a long text."""


def read_log(file: Location, format_name: str | None = None, fields: Fields | None = None) -> Iterator[Entry]:
    """Yield the entries of a log, with one record in memory at a time.

    Args:
        file: A file of JSON lines, a JSON array, Parquet or another readable kind; or a folder of such files.
        format_name: Name of the format in `FORMATS`. If None, the first records tell.
        fields: Names of the record fields to read, where they differ from the usual ones.

    Raises:
        DataError: If the file cannot be read, or its records have an unknown format.
    """
    source = open_source(file)
    records = (each for record in source.read() for each in _without_envelope(record))
    first = list(islice(records, _LOOKED_AT))
    if not first:
        return
    chosen = format_name or _recognized(first, source.name)
    passed = _Passed(map(_as_written, chain(first, records)) if source.filled else chain(first, records))
    for entry in FORMATS[chosen].read(passed, fields or Fields()):
        if isinstance(entry, LostEntry) and entry.why == "no_call" and not entry.reason:
            yield _of_another_format(entry, passed.last, chosen)
        elif isinstance(entry, Call) and not _is_whole(entry):
            reason = "LiteLLM cut or removed a text of the call, or a text quotes its mark."
            yield LostEntry(entry.where, "no_answer", reason)
            for one in (each for each in entry.scores if each.value is not None):
                yield Score(one.name, one.value, entry.session or entry.trace or "")
        else:
            yield entry


def _is_whole(call: Call) -> bool:
    """Return whether a call has all its texts; LiteLLM may cut or remove some before it logs the call."""
    said = [*call.messages, call.answer.message()]
    removed = any(message.get("content") == _REDACTED for message in said)
    return not removed and not _CUT.search(json.dumps([said, call.tools], default=str))


def _as_written(record: Record) -> Record:
    """Return a record of Arrow without the filled-in nulls. The format is recognised from the keys of all columns."""
    if isinstance(record.value, DataError):
        return record
    return replace(record, value=without_filled(record.value))


class _Passed:
    """Iterate over records, and keep the last record that was read.

    Args:
        records: Records of a log.
    """

    def __init__(self, records: Iterator[Record]) -> None:
        self._records = records
        self.last: Record | None = None

    def __iter__(self) -> Iterator[Record]:
        return self

    def __next__(self) -> Record:
        self.last = next(self._records)
        return self.last


def _of_another_format(lost: LostEntry, record: Record | None, chosen: str) -> LostEntry:
    """Return the lost entry with a reason, if the given record is its record and has another format than its file."""
    if record is None or not lost.where.startswith(record.where) or isinstance(record.value, DataError):
        return lost
    if FORMATS[chosen].knows(record.value):
        return lost
    other = next((name for name, each in FORMATS.items() if each.knows(record.value)), None)
    if other is None:
        return lost
    reason = (
        f"the record has the format {other}, but its file is read as {chosen}. Move it to a file of its own."
    )
    return replace(lost, why="unsupported", reason=reason)


def format_of(file: Location, format_name: str | None = None) -> str | None:
    """Return the name of a log's format; None if the file has no records.

    Raises:
        DataError: If the named format does not exist, or the records have no known format.
    """
    if format_name is not None:
        if format_name not in FORMATS:
            raise DataError(f"unknown format of logs {format_name!r}.{did_you_mean(format_name, FORMATS)}")
        return format_name
    source = open_source(file)
    records = (each for record in source.read() for each in _without_envelope(record))
    first = list(islice(records, _LOOKED_AT))
    return _recognized(first, source.name) if first else None


def _recognized(records: list[Record], name: str) -> str:
    """Return the name of the format that the first recognised record has."""
    readable = [(one.where, one.value) for one in records if not isinstance(one.value, DataError)]
    for _, value in readable:
        for format_name, each in FORMATS.items():
            if each.knows(value):
                return format_name
    known = "; ".join(f"{format_name} ({each.says})" for format_name, each in FORMATS.items())
    if readable:
        where, value = readable[0]
        raise DataError(
            f"{where}: expected a record of a log, got one with the keys {keys_of(value)}. Known formats: {known}. "
            'Name one with --format, or write each call as {"request": ..., "response": ...}.'
        )
    broken = next((f" {one.where}: {one.value}" for one in records), "")
    raise DataError(f"{name} holds no record of a log.{broken} Known formats: {known}.")


def _without_envelope(record: Record) -> Iterator[Record]:
    """Yield the records in the list that an API response or a HAR file holds; else yield the record itself.

    A record of a known format is no envelope, even if it has such a list of its own.
    """
    if isinstance(record.value, DataError):
        yield record
        return
    for name in _ENVELOPES:
        key, _, inner = name.partition(".")
        held = unpacked(record.value.get(key), "")
        held = mapping(held).get(inner) if inner else held
        if isinstance(held, list) and held and all(isinstance(each, dict) for each in held):
            if any(each.knows(record.value) for each in FORMATS.values()):
                break
            for index, each in enumerate(held):
                yield replace(record, where=f"{record.where} {name}[{index}]", value=each, text="")
            return
    yield record
