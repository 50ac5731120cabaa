"""Read rollouts of verl: the lines of `rollout_data_dir` and `validation_data_dir`, and outputs of agent loops.

- A line of `STEP.jsonl` has `input`, `output`, `gts`, `score` and `step`. The texts lack special tokens, so that the
  turns of a conversation cannot be separated. The whole output is read as one turn.
- `AgentLoopOutput`, written by `model_dump_json`, has `prompt_ids`, `response_ids`, `response_mask`,
  `response_logprobs` and `reward_score`.

Sources: verl 0.9.1, `trainer/ppo/ray_trainer.py` (`_dump_generations`) and `experimental/agent_loop/agent_loop.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from perturn.formats.logs.log_entries import Entry, Fields, LostEntry, Rollout
from perturn.formats.logs.log_values import bad, mapping, text_id
from perturn.formats.rollouts.rollout_records import (
    TokenNames,
    reader,
    scores_of,
    steps_of,
    steps_of_tokens,
    task_of,
)

_NAMES = TokenNames("prompt_ids", "response_ids", "response_mask", "response_logprobs")


def is_verl(record: Mapping[str, Any]) -> bool:
    """Return whether a record is a dumped generation or the output of an agent loop."""
    return {"input", "output", "score"} <= record.keys() or {
        "prompt_ids",
        "response_ids",
        "response_mask",
    } <= record.keys()


def _rollouts(record: Mapping[str, Any], where: str, fields: Fields) -> Iterator[Entry]:
    """Yield the rollout of a record."""
    if "response_ids" in record:
        extra = mapping(record.get("extra_fields"))
        steps = steps_of_tokens(record, _NAMES, where, fields)
        usual = extra.get("uid") if record.get("uid") is None else record["uid"]
        scores = scores_of(record, fields, record.get("reward_score"))
        yield Rollout(where, task_of(record, fields, usual), steps, scores)
    elif "output" in record:
        yield _dumped(record, where, fields)
    else:
        yield LostEntry(where, "no_call")


read_verl = reader(_rollouts)
"""Yield the rollouts of verl."""


def _dumped(record: Mapping[str, Any], where: str, fields: Fields) -> Rollout:
    """Return the rollout of a dumped generation. Generations of the same input and step are a group."""
    asked, said = (record.get(key) for key in ("input", "output"))
    if not isinstance(asked, str) or not isinstance(said, str):
        raise bad(f"{where}: input and output", "texts", asked if isinstance(said, str) else said)
    steps = steps_of([{"role": "user", "content": asked}], [{"role": "assistant", "content": said}], where)
    step = text_id(record.get("step"))
    gold = record.get("gts")
    return Rollout(
        where,
        task_of(record, fields, f"step {step}: {asked}"),
        steps,
        scores_of(record, fields, record.get("score")),
        policy="" if step is None else f"step {step}",
        answer=gold if isinstance(gold, str) else "",
    )
