"""Read rollouts of SkyRL: the lines of `dump_eval_results`, and a `GeneratorOutput` written as JSON.

- A line of a dumped evaluation has `input_prompt` and `output_response`, both rendered with special tokens. It also has
  `stop_reason`, and `score` with one number, or a number for each token.
- A `GeneratorOutput` has `prompt_token_ids`, `response_ids`, `loss_masks`, `rewards` and `rollout_logprobs`. These are
  lists with an entry for each rollout. With step-wise training an entry is one turn, and `trajectory_ids` gives its
  rollout.

Sources: skyrl 0.3.0, `train/utils/trainer_utils.py` (`dump_per_dataset_eval_results`), `train/generators/base.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from perturn.formats.logs.log_entries import Entry, Fields, LostEntry, Rollout, Step
from perturn.formats.logs.log_values import bad, mapping, text_id
from perturn.formats.rollouts.chat_markup import conversation_of, response_of
from perturn.formats.rollouts.rollout_records import (
    TokenNames,
    cut_last,
    numbers,
    reader,
    rows_of_columns,
    scores_of,
    steps_of,
    steps_of_tokens,
    task_of,
)

_NAMES = TokenNames("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "rewards")


def is_skyrl(record: Mapping[str, Any]) -> bool:
    """Return whether a record is a line of a dumped evaluation, or a generator's output."""
    return {"input_prompt", "output_response"} <= record.keys() or {
        "prompt_token_ids",
        "response_ids",
        "loss_masks",
    } <= record.keys()


def _rollouts(record: Mapping[str, Any], where: str, fields: Fields) -> Iterator[Entry]:
    """Yield the rollouts of a record."""
    if "loss_masks" in record:
        yield from _generated(record, where, fields)
    elif "output_response" in record:
        yield _evaluated(record, where, fields)
    else:
        yield LostEntry(where, "no_call")  # a line of aggregated_results.jsonl


read_skyrl = reader(_rollouts)
"""Yield the rollouts of SkyRL."""


def _evaluated(record: Mapping[str, Any], where: str, fields: Fields) -> Rollout:
    """Return the rollout of a line of a dumped evaluation. Lines with the same prompt are a group."""
    asked, said = (record.get(key) for key in ("input_prompt", "output_response"))
    if not isinstance(asked, str) or not isinstance(said, str):
        raise bad(
            f"{where}: input_prompt and output_response", "texts", asked if isinstance(said, str) else said
        )
    steps = steps_of(conversation_of(asked), response_of(said), where)
    source = text_id(record.get("data_source"))
    return _finished(
        record, where, fields, steps, f"{source}: {asked}" if source else asked, record.get("score")
    )


def _finished(
    record: Mapping[str, Any], where: str, fields: Fields, steps: tuple[Step, ...], task: Any, reward: Any
) -> Rollout:
    """Return a rollout with the sum of its rewards and its stop reason."""
    total = sum(numbers(reward, f"{where}: rewards")) if isinstance(reward, list) else reward
    cut = record.get("stop_reasons", record.get("stop_reason")) == "length"
    scores = scores_of(record, fields, total)
    return Rollout(
        where, task_of(record, fields, task), cut_last(steps) if cut else steps, scores, truncated=cut
    )


def _generated(record: Mapping[str, Any], where: str, fields: Fields) -> Iterator[Entry]:
    """Yield the rollouts of a generator's output."""
    episodes: dict[str, tuple[str, dict[str, Any], list[Step], list[Any]]] = {}
    for number, (at, row) in enumerate(rows_of_columns(record, "response_ids", where)):
        steps = steps_of_tokens(row, _NAMES, at, fields)
        paid = row.get("rewards")
        paid = numbers(paid, f"{at}: rewards") if isinstance(paid, list) else [paid]
        identity = row.get("trajectory_ids")
        stepwise = isinstance(record.get("is_last_step"), list) and identity is not None
        key = json.dumps(identity, sort_keys=True) if stepwise else str(number)
        _, _, held, rewards = episodes.setdefault(key, (at, row, [], []))
        held += steps
        rewards += paid
        episodes[key] = (episodes[key][0], row, held, rewards)  # the last row has the stop reason
    for at, row, steps_held, rewards in episodes.values():
        known = [each for each in rewards if each is not None]
        task = _instance(row.get("trajectory_ids"))
        yield _finished(
            row, at, fields, tuple(steps_held), task, known if len(known) == len(rewards) else None
        )


def _instance(identity: Any) -> str | None:
    """Return the task in a trajectory id, which is an object, a list, or the text INSTANCE_REPETITION."""
    held = mapping(identity)
    if held:
        return text_id(held.get("instance_id"))
    if isinstance(identity, list) and identity:
        return text_id(identity[0])
    return identity.rpartition("_")[0] or None if isinstance(identity, str) else None
