"""Read scored conversations: JSON lines with `messages`, a reward, and the task that groups them.

    {"task": "refund-17", "messages": [{"role": "user", "content": "..."}, ...], "reward": 0.0}

Each assistant message may have a `reward` of its own, or the record has a list `rewards` with one for each of them.
The messages may also be under `conversations`, with `from` and `value`, as in ShareGPT.

This is Perturn's own format, for episodes of an agent that kept texts alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from perturn.errors import DataError
from perturn.formats.chat_messages import is_trained
from perturn.formats.column_names import other_names
from perturn.formats.logs.log_entries import Entry, Fields, LostEntry, Rollout
from perturn.formats.logs.log_values import bad, first, mapping, score_value, text_id, unpacked
from perturn.formats.logs.provider_messages import tools_of
from perturn.formats.rollouts.rollout_records import (
    listed,
    reader,
    scores_of,
    steps_of,
    task_of,
)

_MESSAGES = ("messages", "conversations")
_SCORES = ("reward", "score")
"""Keys of the score. If a record has both, `reward` counts."""
_REWARDS = "rewards"
"""Key of a list with the reward of each assistant message."""
_TASKS = ("task", "task_id")
"""Keys of the task. If a record has both, `task` counts."""
_READ = {
    *("system", "tools", "truncated", "error", "model", "success"),
    *(*_MESSAGES, *_SCORES, _REWARDS, *_TASKS),
}
"""Keys of a record that are read."""
_LONGEST = 1000
"""Maximum length of an error, in characters. A longer error is cut."""
_ANSWERS = frozenset({"response", "response_body", "responseBody", "resp", "completion", "choices"})
"""Keys of a logged response, whose request has the key `messages` too."""


def is_conversation(record: Mapping[str, Any]) -> bool:
    """Return whether a record is a conversation with a score, and not a request that is logged with its response."""
    messages = _messages(record)
    if not isinstance(messages, list) or _ANSWERS & record.keys():
        return False
    scored = any(key in record for key in (*_SCORES, _REWARDS))
    return scored or any("reward" in mapping(each) for each in messages)


def _messages(record: Mapping[str, Any]) -> Any:
    """Return the messages of a record; None if it has none."""
    return unpacked(next((record[key] for key in _MESSAGES if record.get(key) is not None), None), "")


def _truth(value: Any, where: str) -> bool | None:
    """Return a field that is true or false; None if it is missing.

    Raises:
        DataError: If the value is another one, such as the text `false`.
    """
    if value not in (None, True, False):
        raise bad(where, "true or false", value)
    return None if value is None else bool(value)


def _rollouts(record: Mapping[str, Any], where: str, fields: Fields) -> Iterator[Entry]:
    """Yield the rollout of a record. Each assistant message is a turn, which may be marked as not trained."""
    if (messages := _messages(record)) is None:
        if first(record, *_SCORES, _REWARDS) is not None and not _ANSWERS & record.keys():
            raise DataError(f"{where}: messages: expected a list, got none.")
        yield LostEntry(where, "no_call")
        return
    if logged := {key for key in _ANSWERS if record.get(key)}:
        raise DataError(
            f"{where}: the record has {min(logged)} too, so that it is a request and no conversation."
        )
    messages = listed(messages, f"{where}: messages", "user")
    error = record.get("error")
    if record.get("system"):
        messages = [{"role": "system", "content": record["system"]}, *messages]
    tools = tools_of(record.get("tools"), f"{where}: tools")
    rewards = _rewards(record, messages, where)
    steps = steps_of([], messages, where, tools, is_trained, rewards)
    score = next((record[key] for key in _SCORES if record.get(key) not in (None, "")), None)
    if rewards and (score is None or score_value(score) is None):
        score = sum(reward or 0.0 for reward in rewards)
    ignored = _ignored(record)
    kept = _without(record, ignored)
    task = first(kept, *_TASKS)
    if fields.task is None and task is not None and text_id(task) is None:
        raise bad(f"{where}: task", "a text or a whole number", task)
    question = next((each.get("content") for each in steps[-1].messages if each["role"] == "user"), None)
    named = {path.partition(".")[0] for path in (fields.task, fields.score) if path}
    yield Rollout(
        where,
        task_of(record, fields, question if task is None else task),
        steps,
        scores_of(record, fields, score),
        truncated=bool(_truth(record.get("truncated"), f"{where}: truncated")),
        error=str(error)[:_LONGEST] if error else None,
        policy=str(record.get("model") or ""),
        success=_truth(first(kept, "success"), f"{where}: success"),
        unread=(*(ignored - named), *other_names(_without(kept, _READ | named))),
    )


def _without(record: Mapping[str, Any], keys: Set[str]) -> dict[str, Any]:
    return {key: held for key, held in record.items() if key not in keys}


def _ignored(record: Mapping[str, Any]) -> set[str]:
    """Return the optional keys of a record whose values cannot be read."""
    success, task = first(record, "success"), first(record, "task_id")
    found = {"success": success in (None, True, False), "task_id": task is None or text_id(task) is not None}
    return {key for key, is_readable in found.items() if not is_readable}


def _rewards(record: Mapping[str, Any], messages: Sequence[Any], where: str) -> list[float | None]:
    """Return the reward of each assistant message; empty if there are none.

    Raises:
        DataError: If a reward is no number, or belongs to a message that is no turn.
    """
    for index, each in enumerate(map(mapping, messages)):
        if each.get("role") != "assistant" and each.get("reward") is not None:
            raise DataError(
                f"{where}: message {index}: a reward belongs to an assistant message, got one on a message with the "
                f"role {each.get('role')!r}."
            )
    said = [mapping(each) for each in messages if mapping(each).get("role") == "assistant"]
    given, listed_too = [each.get("reward") for each in said], record.get(_REWARDS)
    if isinstance(listed_too, list):
        if any(value is not None for value in given):
            raise DataError(f"{where}: rewards: the messages have rewards too. Write only one of the two.")
        if len(listed_too) != len(said):
            raise DataError(
                f"{where}: rewards: expected {len(said)} entries, one for each assistant message, got "
                f"{len(listed_too)}."
            )
        given = listed_too
    found = []
    for index, held in enumerate(given):
        value = None if held in (None, "") else score_value(held)
        if value is None and held not in (None, ""):
            raise bad(f"{where}: reward of assistant message {index}", "a number", held)
        found.append(value)
    return found if any(value is not None for value in found) else []


read_conversations = reader(_rollouts)
"""Yield the rollouts of scored conversations."""
