"""Read rollouts of agent-lightning: events of its server, and spans and triplets of its stores before 1.0.

- An event has `rollout_id`, `attempt_id`, `event_type` and `data`. A `model_request` holds a request and its response,
  with token ids; a `reward` event rewards the calls of the attempt so far.
- A span (`Span.model_dump_json()`, 0.3) has `rollout_id`, `attempt_id`, `sequence_id` and attributes of OpenTelemetry.
- `RolloutLegacy` has `triplets` of prompt, response and reward, whose token ids a tokenizer decodes.

A reward is given to the newest earlier call of its attempt. A record of a rollout's state (`Rollout`) adds no turn.

Sources: agentlightning 1.0.0, `schemas.py` and `server/routes/events.py`; 0.3.0, `types/core.py`, `types/tracer.py`,
`emitter/reward.py` and `adapter/triplet.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from perturn.errors import DataError
from perturn.formats.json_stream import Record
from perturn.formats.logs.log_entries import Call, Entry, Fields, LostEntry, Rollout, Score, Step
from perturn.formats.logs.log_values import (
    at_path,
    bad,
    first,
    ids_of,
    mapping,
    objects,
    score_value,
    seconds,
    text_id,
)
from perturn.formats.logs.otel_spans import content_of
from perturn.formats.logs.provider_messages import messages_of, tools_of
from perturn.formats.logs.request_logs import answers_in
from perturn.formats.rollouts.rollout_records import REWARD, TokenNames, scores_of, steps_of_tokens, task_of

_NAMES = TokenNames("prompt", "response", logprobs="logprobs")
_PRIMARY = "agentlightning.reward.0.value"
_OUTPUTS = ("agentops.task.output", "agentops.entity.output")
_MOST_OPEN = 100_000
"""Maximum number of attempts whose newest call is remembered."""


def is_agent_lightning(record: Mapping[str, Any]) -> bool:
    """Return whether a record is an event, a span, or a rollout with triplets."""
    return "rollout_id" in record and (
        {"event_type", "data"} <= record.keys()
        or {"sequence_id", "span_id", "attributes"} <= record.keys()
        or "triplets" in record
        or {"input", "status"} <= record.keys()
    )


def read_agent_lightning(records: Iterator[Record], fields: Fields) -> Iterator[Entry]:
    """Yield the calls, scores and rollouts of agent-lightning."""
    newest: OrderedDict[str, str] = OrderedDict()
    for record in records:
        if isinstance(record.value, DataError):
            yield LostEntry(record.where, "broken", str(record.value))
            continue
        try:
            entries = list(_entries(record.value, record.where, fields, newest))
            if isinstance(call := entries[0], Call):  # all choices of a response have the same ids
                newest[str(call.session)] = call.ids[0]
                newest.move_to_end(str(call.session))
            yield from entries
        except DataError as error:
            yield LostEntry(record.where, "unsupported", str(error))
        while len(newest) > _MOST_OPEN:
            newest.popitem(last=False)


def _entries(
    record: Mapping[str, Any], where: str, fields: Fields, newest: Mapping[str, str]
) -> Iterator[Entry]:
    """Yield the entries of a record."""
    rollout = text_id(record.get("rollout_id"))
    attempt = f"{rollout}/{text_id(record.get('attempt_id')) or '0'}"
    task = None if fields.task is None else text_id(at_path(record, fields.task))
    if rollout is not None and isinstance(record.get("triplets"), list):
        yield _triplets(record, where, fields)
    elif record.get("event_type") == "model_request":
        yield from _request(mapping(record.get("data")), record, where, attempt, task)
    elif record.get("event_type") == "reward":
        yield _reward(mapping(record.get("data")).get("value"), where, attempt, newest)
    elif isinstance(record.get("attributes"), Mapping):
        yield from _span(record, where, attempt, task, newest)
    else:
        yield LostEntry(where, "no_call")


def _request(
    data: Mapping[str, Any], record: Mapping[str, Any], where: str, attempt: str, task: str | None
) -> Iterator[Entry]:
    """Yield a call for each choice of a request that the server forwarded to a model."""
    request, response = mapping(data.get("request")), data.get("response")
    answers = list(answers_in(response, where)) if data.get("status", "ok") == "ok" and response else []
    if not answers or not request.get("messages"):
        yield LostEntry(where, "no_answer", "the request has no answer.")
        return
    for index, answer in enumerate(answers):
        yield Call(
            where,
            messages_of(request["messages"], where),
            answer,
            (where,),
            choice=index,
            session=attempt,
            time=seconds(record.get("timestamp")),
            tools=tools_of(request.get("tools"), where),
            model=str(data.get("model") or ""),
            task=task,
        )


def _reward(value: Any, where: str, attempt: str, newest: Mapping[str, str]) -> Entry:
    """Return a reward as the score of the newest call of an attempt."""
    score = score_value(value)
    if score is None:
        raise bad(f"{where}: reward", "a finite number", value)
    return Score(REWARD, score, newest.get(attempt, attempt))


def _span(
    record: Mapping[str, Any], where: str, attempt: str, task: str | None, newest: Mapping[str, str]
) -> Iterator[Entry]:
    """Yield the calls or the reward in a span."""
    attributes = mapping(record.get("attributes"))
    reward = first(attributes, _PRIMARY, "reward")
    for output in (mapping(attributes.get(name)) for name in _OUTPUTS):
        if reward is None and output.get("type") == "reward":
            reward = output.get("value")
    if reward is not None:
        yield _reward(reward, where, attempt, newest)
        return
    found = content_of(attributes, where)
    answers = [action for each in found.answers for action in answers_in(each, where)] if found else []
    if found is None or not answers:
        yield LostEntry(where, "no_call") if found is None else LostEntry(where, "no_answer", "no answer.")
        return
    ids = attributes.get("response_token_ids")
    if isinstance(ids, list) and ids and all(type(each) is int for each in ids):
        answers[0] = replace(answers[0], token_ids=tuple(ids))
    for index, answer in enumerate(answers):
        yield Call(
            where,
            messages_of(found.asked, where, found.system),
            answer,
            ids_of(record.get("span_id"), attributes.get("gen_ai.response.id")) or (where,),
            choice=index,
            session=attempt,
            time=seconds(record.get("start_time")),
            tools=tools_of(found.tools, where),
            model=str(first(attributes, "gen_ai.response.model", "gen_ai.request.model") or ""),
            task=task,
        )


def _triplets(record: Mapping[str, Any], where: str, fields: Fields) -> Rollout:
    """Return the rollout of some triplets. Each triplet is one answer, with the whole prompt of that answer."""
    steps: list[Step] = []
    for index, triplet in enumerate(objects(record.get("triplets"))):
        said = mapping(triplet.get("response"))
        held = {
            "prompt": _ids(triplet.get("prompt")),
            "response": _ids(triplet.get("response")),
            "logprobs": _logprobs(said.get("logprobs")) or None,
        }
        found = steps_of_tokens(held, _NAMES, f"{where}: triplets[{index}]", fields)
        reward = triplet.get("reward")
        steps.append(replace(found[0], reward=None if reward is None else score_value(reward)))
    total = record.get("final_reward")
    if total is None and any(step.reward is not None for step in steps):
        total = sum(step.reward or 0.0 for step in steps)
    inputs = mapping(mapping(record.get("task")).get("input")) or mapping(record.get("input"))
    usual = text_id(first(inputs, "data_id", "instance_id", "id"))
    return Rollout(where, task_of(record, fields, usual), tuple(steps), scores_of(record, fields, total))


def _logprobs(held: Any) -> Any:
    """Return the log-probabilities of tokens, which may be objects; any other value unchanged."""
    return [mapping(each).get("logprob", each) for each in held] if isinstance(held, list) else held


def _ids(value: Any) -> Any:
    """Return token ids that are given directly or under the key `token_ids`."""
    return mapping(value).get("token_ids") if isinstance(value, Mapping) else value
