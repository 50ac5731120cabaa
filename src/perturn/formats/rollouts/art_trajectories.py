"""Read rollouts of ART: Parquet files of trajectory groups, and groups or trajectories as JSON lines.

- ART writes `trajectories/SPLIT/STEP.parquet`: a row for each trajectory, with `group_index`, `reward`, `messages` and
  `tools`. The key `trainable` of a message says whether the policy sampled it.
- Older versions wrote JSON lines with a group in each line: `{"trajectories": [...]}`.
- `Trajectory.model_dump_json()` is a line with `messages_and_choices`. Choices of the chat-completions API are answers,
  whose log-probabilities are kept. If the server gave tokens as `token_id:N`, the token ids are kept too.

Sources: openpipe-art 0.5.18, `utils/trajectory_logging.py`, `utils/trajectory_migration.py` and `trajectories.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from perturn.errors import DataError
from perturn.formats.logs.log_entries import Entry, Fields, LostEntry, Rollout, Step
from perturn.formats.logs.log_values import mapping, objects, text_id
from perturn.formats.logs.provider_messages import tools_of
from perturn.formats.logs.sampled_tokens import with_choice_tokens
from perturn.formats.rollouts.rollout_records import cut_last, listed, reader, scores_of, steps_of, task_of

_FILE = re.compile(r":(?: row)? ?(\d+)$")


def is_art(record: Mapping[str, Any]) -> bool:
    """Return whether a record is a trajectory or a group of ART."""
    if isinstance(record.get("trajectories"), list):
        return all("messages_and_choices" in mapping(each) for each in record["trajectories"])
    return "messages_and_choices" in record or {"group_index", "reward", "messages"} <= record.keys()


def _rollouts(record: Mapping[str, Any], where: str, fields: Fields) -> Iterator[Entry]:
    """Yield the rollouts of a record."""
    if isinstance(record.get("trajectories"), list):
        group = f"group {where}"
        found = [
            _trajectory(mapping(each), f"{where}: trajectories[{index}]", fields, group)
            for index, each in enumerate(record["trajectories"])
        ]
        yield from found
        tasks, policies = {one.task for one in found}, {one.policy for one in found}
        task = tasks.pop() if len(tasks) == 1 else group
        policy = policies.pop() if len(policies) == 1 else ""
        for index, error in enumerate(objects(record.get("exceptions"))):
            said = f"{error.get('type')}: {error.get('message')}"
            yield Rollout(f"{where}: exceptions[{index}]", task or group, (), error=said, policy=policy)
    elif "group_index" in record:
        file = Path(_FILE.sub("", where)).stem
        yield _trajectory(record, where, fields, f"{file}: group {record['group_index']}")
    elif "messages_and_choices" in record:
        yield _trajectory(record, where, fields, None)
    else:
        yield LostEntry(where, "no_call")


read_art = reader(_rollouts)
"""Yield the rollouts of ART."""


def _trajectory(record: Mapping[str, Any], where: str, fields: Fields, group: str | None) -> Rollout:
    """Return a trajectory as a rollout."""
    main = record.get("messages_and_choices", record.get("messages"))
    steps = _history(main, record.get("tools"), where)
    for index, each in enumerate(objects(record.get("additional_histories"))):
        at = f"{where}: additional_histories[{index}]"
        steps += _history(each.get("messages_and_choices"), each.get("tools"), at)
    version = text_id(record.get("final_policy_version"))
    scores = scores_of(record, fields, record.get("reward"))
    policy = "" if version is None else f"step {version}"
    return Rollout(
        where, task_of(record, fields, group), steps, scores, not steps[-1].answer.ended, policy=policy
    )


def _history(value: Any, tools: Any, where: str) -> tuple[Step, ...]:
    """Return the answers of a conversation. An assistant message that the policy did not sample carries no loss."""
    given = listed(value, f"{where}: messages", "user")
    choices = [_choice(each) for each in given]
    trained = [
        choice is not None or mapping(each).get("trainable") is True
        for choice, each in zip(choices, given, strict=True)
    ]
    if not any(trained):
        raise DataError(f"{where}: expected a choice, which the policy sampled, got messages alone.")
    begun = trained.index(True)
    messages = [
        mapping(each if choice is None else choice["message"])
        for choice, each in zip(choices, given, strict=True)
    ]
    shown = [
        {key: value for key, value in each.items() if key != "trainable" and value is not None}
        for each in messages
    ]
    steps = list(steps_of(shown[:begun], shown[begun:], where, tools_of(tools, f"{where}: tools")))
    answers = [at for at in range(begun, len(shown)) if shown[at].get("role") == "assistant"]
    for number, at in enumerate(answers):
        choice = choices[at]
        step = replace(steps[number], trained=trained[at])
        if choice is not None:
            step = replace(step, answer=with_choice_tokens(step.answer, choice, f"{where}: message {at}"))
            step = cut_last((step,))[0] if choice.get("finish_reason") == "length" else step
        steps[number] = step
    return tuple(steps)


def _choice(message: Any) -> Mapping[str, Any] | None:
    """Return a message that is a choice of the chat-completions API; None for any other message."""
    held = mapping(message)
    return held if "finish_reason" in held and isinstance(held.get("message"), Mapping) else None
