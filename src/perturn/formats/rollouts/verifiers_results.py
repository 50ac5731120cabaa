"""Read rollouts of verifiers: rows of `results.jsonl`, and episodes of `traces.jsonl`.

- A row of `results.jsonl` (`vf-eval --save-results`, verifiers up to 0.1 and `verifiers.legacy` of 0.4) has
  `example_id`, `prompt`, `completion` and `reward`. With `--state-columns trajectory` it has the tokens of each call.
- A line of `traces.jsonl` (`verifiers.v1`, and prime-rl) is an episode with the traces of its agents. A trace is a
  graph of messages, in which messages with `sampled` are answers.

Sources: verifiers 0.4.0, `legacy/utils/save_utils.py`, `v1/cli/output.py`, `v1/graph.py` and `v1/trace.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from perturn.errors import DataError
from perturn.formats.logs.log_entries import Entry, Fields, LostEntry, Rollout, Step
from perturn.formats.logs.log_values import bad, mapping, objects
from perturn.formats.logs.provider_messages import answer_of, messages_of, tools_of
from perturn.formats.rollouts.rollout_records import (
    cut_last,
    listed,
    numbers,
    reader,
    scores_of,
    steps_of,
    task_of,
    with_calls,
)
from perturn.types import Action

_LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length")
"""Stop conditions of traces that count as limits, as in `Trace.is_truncated`."""


def is_verifiers(record: Mapping[str, Any]) -> bool:
    """Return whether a record is a row of results or an episode with traces."""
    return {"example_id", "completion"} <= record.keys() or (
        isinstance(record.get("traces"), list) and isinstance(record.get("task"), Mapping)
    )


def _rollouts(record: Mapping[str, Any], where: str, fields: Fields) -> Iterator[Entry]:
    """Yield the rollouts of a record."""
    if "traces" in record:
        yield from _episode(record, where, fields)
    elif "example_id" in record:
        yield _result(record, where, fields)
    else:
        yield LostEntry(where, "no_call")


read_verifiers = reader(_rollouts)
"""Yield the rollouts of verifiers."""


def _result(record: Mapping[str, Any], where: str, fields: Fields) -> Rollout:
    """Return the rollout of a row of results."""
    error = _error_text(record.get("error"))
    tools = tools_of(record.get("tool_defs"), f"{where}: tool_defs")
    calls = objects(record.get("trajectory"))
    prompt = listed(record.get("prompt"), f"{where}: prompt", "user")
    completion = listed(record.get("completion"), f"{where}: completion", "assistant")
    steps: tuple[Step, ...] = ()
    if calls:
        steps = tuple(_call(call, f"{where}: trajectory[{at}]", tools) for at, call in enumerate(calls))
    elif completion or error is None:
        steps = steps_of(prompt, completion, where, tools)
    last_cut = bool(calls) and bool(calls[-1].get("is_truncated"))
    return Rollout(
        where,
        task_of(record, fields, record.get("example_id")),
        cut_last(steps) if last_cut else steps,
        scores_of(record, fields, record.get("reward")),
        truncated=bool(record.get("is_truncated")),
        error=error,
        answer=str(record.get("answer") or ""),
    )


def _call(call: Mapping[str, Any], where: str, tools: tuple[Mapping[str, Any], ...]) -> Step:
    """Return a step of a trajectory, with the sampled tokens of its call."""
    prompt = listed(call.get("prompt"), f"{where}: prompt", "user")
    completion = listed(call.get("completion"), f"{where}: completion", "assistant")
    (step, *more) = steps_of(prompt, completion, where, tools)
    if more:
        raise DataError(f"{where}: completion: expected one answer, got {1 + len(more)}.")
    reward = call.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float | None):
        raise bad(f"{where}: reward", "a number", reward)
    return replace(step, answer=_with_tokens(step.answer, mapping(call.get("tokens")), where), reward=reward)


def _with_tokens(action: Action, tokens: Mapping[str, Any], where: str) -> Action:
    """Return an answer with the sampled tokens of its call, if they are recorded."""
    if not tokens.get("completion_ids"):
        return action
    ids = numbers(tokens["completion_ids"], f"{where}: completion_ids", int)
    logprobs = tokens.get("completion_logprobs") or None
    if logprobs is not None:
        logprobs = tuple(numbers(logprobs, f"{where}: completion_logprobs", float, len(ids)))
    return replace(action, token_ids=tuple(ids), logprobs=logprobs)


def _error_text(error: Any) -> str | None:
    """Return an error as text; None if there is no error."""
    if not error:
        return None
    held = mapping(error)
    name, said = held.get("error") or held.get("type"), held.get("message")
    return ": ".join(str(each) for each in (name, said) if each) or str(error)


def _episode(record: Mapping[str, Any], where: str, fields: Fields) -> Iterator[Entry]:
    """Yield a rollout for each trace of an episode, except traces that are not trained on."""
    task, group = mapping(record.get("task")), mapping(record.get("group"))
    data = mapping(task.get("data"))
    usual = task_of(record, fields, group.get("id") or task.get("key") or task.get("hash") or data.get("idx"))
    traces = objects(record.get("traces"))
    names = {_agent(trace) for trace in traces}
    if not traces:
        errors = objects(record.get("errors"))
        yield Rollout(where, usual, (), error=_error_text(errors[-1] if errors else None) or "no trace")
    for index, trace in enumerate(traces):
        at = where if len(traces) == 1 else f"{where}: traces[{index}]"
        if mapping(trace.get("agent")).get("trainable") is False:
            yield LostEntry(at, "no_call")
            continue
        own = f"{usual}/{_agent(trace)}" if usual and len(names) > 1 else usual
        yield _trace(trace, own, at, fields)


def _agent(trace: Mapping[str, Any]) -> str:
    return str(mapping(trace.get("agent")).get("name") or "agent")


def _trace(trace: Mapping[str, Any], task: str | None, where: str, fields: Fields) -> Rollout:
    """Return the rollout of a trace."""
    tools = tools_of(trace.get("tools"), f"{where}: tools")
    nodes = objects(trace.get("nodes"))
    steps = tuple(_node_steps(nodes, where, tools))
    errors = objects(trace.get("errors"))
    failed = not trace.get("ok", True) and errors
    if not steps and not failed:
        raise DataError(f"{where}: expected a node with sampled=true, got none of {len(nodes)} nodes.")
    calls = [call for call in objects(trace.get("calls")) if not call.get("error")]
    last_cut = bool(calls) and calls[-1].get("finish_reason") == "length"
    config = mapping(mapping(trace.get("agent")).get("config"))
    return Rollout(
        where,
        task,
        cut_last(steps) if last_cut else steps,
        scores_of(trace, fields, _reward(trace, where)),
        truncated=last_cut or trace.get("stop_condition") in _LIMITS,
        error=_error_text(errors[-1]) if failed else None,
        policy=str(config.get("model") or (calls[-1].get("model") if calls else None) or ""),
    )


def _reward(trace: Mapping[str, Any], where: str) -> float | None:
    """Return the weighted sum of a trace's rewards; None if the trace was not scored."""
    given = [mapping(each) for each in mapping(trace.get("rewards")).values() if each is not None]
    for each in given:
        numbers([each.get("score"), each.get("weight", 1.0)], f"{where}: rewards")
    return sum(each["score"] * each.get("weight", 1.0) for each in given) if given else None


def _node_steps(
    nodes: list[Mapping[str, Any]], where: str, tools: tuple[Mapping[str, Any], ...]
) -> Iterator[Step]:
    """Yield a step for each sampled node, with the messages on the path from the root to that node."""
    paths: list[tuple[Any, ...]] = []
    for index, node in enumerate(nodes):
        at, parent = f"{where}: nodes[{index}]", node.get("parent")
        if parent is not None and not (isinstance(parent, int) and 0 <= parent < index):
            raise bad(f"{at}.parent", f"the index of an earlier node, below {index}, or null", parent)
        before = () if parent is None else paths[parent]
        message = with_calls(node.get("message"), at)
        if node.get("sampled"):
            action = _with_tokens(answer_of(message, at) or Action(""), _sampled(node, at), at)
            yield Step(before, action, tools)
            paths.append((*before, action.message()))
        else:
            paths.append((*before, *messages_of([message], at)))


def _sampled(node: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the sampled tokens and log-probabilities of a node, under the keys of a call."""
    if not node.get("token_ids"):
        return {}
    ids = numbers(node["token_ids"], f"{where}.token_ids", int)
    mask = node.get("mask")
    if not isinstance(mask, list) or len(mask) != len(ids):
        got = len(mask) if isinstance(mask, list) else repr(mask)[:60]
        raise DataError(f"{where}.mask: expected {len(ids)} entries, one for each token, got {got}.")
    sampled = [token for token, kept in zip(ids, mask, strict=True) if kept]
    return {"completion_ids": sampled, "completion_logprobs": node.get("logprobs")}
