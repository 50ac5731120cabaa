"""Read rollouts of TRL: the completions that `log_completions` writes, and results of a `rollout_func`.

- `GRPOTrainer` and `RLOOTrainer` write `completions/completions_STEP.parquet`. Its columns are `step`, `prompt`,
  `completion`, `advantage`, and one for each reward function.
- A `rollout_func` returns the lists `prompt_ids`, `completion_ids`, `logprobs` and sometimes `env_mask`, with an entry
  for each rollout. Its result, written as JSON, is one record.

Sources: trl 1.16.0, `trainer/grpo_trainer.py` (`log`, `_generate`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from perturn.formats.column_names import without_filled
from perturn.formats.logs.log_entries import Entry, Fields, LostEntry, Rollout, Score
from perturn.formats.logs.log_values import score_value, text_id
from perturn.formats.rollouts.rollout_records import (
    TokenNames,
    listed,
    reader,
    rows_of_columns,
    scores_of,
    steps_of,
    steps_of_tokens,
    task_of,
)

_NAMES = TokenNames("prompt_ids", "completion_ids", "env_mask", "logprobs")
_KNOWN = ("step", "prompt", "completion", "advantage")


def is_trl(record: Mapping[str, Any]) -> bool:
    """Return whether a record is a row of logged completions, or a result of a rollout function."""
    return set(_KNOWN) <= record.keys() or (
        {"prompt_ids", "completion_ids"} <= record.keys() and "example_id" not in record
    )


def _rollouts(record: Mapping[str, Any], where: str, fields: Fields) -> Iterator[Entry]:
    """Yield the rollouts of a record."""
    if "prompt_ids" in record:
        for at, row in rows_of_columns(record, "prompt_ids", where):
            steps = steps_of_tokens(row, _NAMES, at, fields)
            yield Rollout(at, task_of(row, fields, None), steps, scores_of(row, fields, row.get("reward")))
    elif "completion" in record:
        yield _completion(
            without_filled(record), where, fields
        )  # pandas writes nulls of Parquet to JSON lines
    else:
        yield LostEntry(where, "no_call")


read_trl = reader(_rollouts)
"""Yield the rollouts of TRL."""


def _completion(record: Mapping[str, Any], where: str, fields: Fields) -> Rollout:
    """Return the rollout of a row of logged completions. Completions of the same prompt and step are a group."""
    prompt = listed(record.get("prompt"), f"{where}: prompt", "user")
    completion = listed(record.get("completion"), f"{where}: completion", "assistant")
    steps = steps_of(prompt, completion, where)
    first = next((each["content"] for each in steps[0].messages if each["role"] == "user"), "")
    step = text_id(record.get("step"))
    return Rollout(
        where,
        task_of(record, fields, f"step {step}: {first}" if first else None),
        steps,
        tuple(_scores(record, fields)),
        policy="" if step is None else f"step {step}",
    )


def _scores(record: Mapping[str, Any], fields: Fields) -> Iterator[Score]:
    """Yield the value of each reward function. Every column of numbers without another meaning belongs to one."""
    for name, value in record.items():
        wanted = name == fields.score if fields.score is not None else name not in _KNOWN
        if wanted and not isinstance(value, str) and (number := score_value(value)) is not None:
            yield Score(name, number, "")
