"""Read scored conversations: JSON lines with `messages`, a reward, and the task that groups them.

    {"task": "refund-17", "messages": [{"role": "user", "content": "..."}, ...], "reward": 0.0}

This is Perturn's own format, for episodes of an agent that kept texts alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from perturn.formats.logs.log_entries import Entry, Fields, LostEntry, Rollout
from perturn.formats.logs.log_values import text_id
from perturn.formats.logs.provider_messages import tools_of
from perturn.formats.rollouts.rollout_records import cut_last, listed, reader, scores_of, steps_of, task_of

_SCORES = ("reward", "score")
"""Keys of the score. If a record has both, `reward` counts."""
_ANSWERS = frozenset({"response", "response_body", "responseBody", "resp", "completion", "choices"})
"""Keys of a logged response, whose request has the key `messages` too."""


def is_conversation(record: Mapping[str, Any]) -> bool:
    """Return whether a record is a conversation with a score, and not a request that is logged with its response."""
    scored = any(key in record for key in _SCORES)
    return scored and isinstance(record.get("messages"), list) and not _ANSWERS & record.keys()


def _rollouts(record: Mapping[str, Any], where: str, fields: Fields) -> Iterator[Entry]:
    """Yield the rollout of a record. Each assistant message is a turn, unless its `weight` is 0."""
    if "messages" not in record:
        yield LostEntry(where, "no_call")
        return
    messages = listed(record["messages"], f"{where}: messages", "user")
    error = text_id(record.get("error"))
    tools = tools_of(record.get("tools"), f"{where}: tools")
    steps = steps_of([], messages, where, tools, trained=lambda message: message.get("weight") != 0)
    cut = bool(record.get("truncated"))
    score = next((record[key] for key in _SCORES if record.get(key) is not None), None)
    task = record.get("task")
    first = next((each.get("content") for each in steps[0].messages if each["role"] == "user"), None)
    yield Rollout(
        where,
        task_of(record, fields, first if task is None else task),
        cut_last(steps) if cut else steps,
        scores_of(record, fields, score),
        truncated=cut,
        error=error or None,
        policy=str(record.get("model") or ""),
    )


read_conversations = reader(_rollouts)
"""Yield the rollouts of scored conversations."""
