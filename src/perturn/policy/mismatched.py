"""Mismatched rows: the actions of one after the prompt of another, from which KTO has its reference point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from perturn.errors import DataError
from perturn.losses import TurnLogprobs
from perturn.policy.logprobs import logprobs_and_entropy
from perturn.policy.packing import Batch
from perturn.policy.tokens import Encoded, Example, Renderer, sides
from perturn.types import Trajectory, WeightedTrajectory


def mismatched(prompt: Trajectory, actions: Trajectory) -> Trajectory:
    """An episode as it was played, after the prompt and the observation that posed another one's task."""
    first = replace(
        actions.turns[0], observation=prompt.turns[0].observation, recalled=prompt.turns[0].recalled
    )
    return replace(actions, prompt=prompt.prompt, tools=prompt.tools, turns=(first, *actions.turns[1:]))


def with_mismatched(
    examples: Sequence[Example],
    rows: Sequence[WeightedTrajectory],
    renderer: Renderer,
    max_length: int | None,
) -> list[Example]:
    """The examples, each with the actions of the last row before it of another task after its own prompt.

    Raises:
        DataError: If all rows are of one task.
    """
    episodes = [row.trajectory for row in rows]
    if len({one.task.id for one in episodes}) < 2:
        raise DataError(
            "the loss needs rows of at least two tasks, whose prompts and actions can be mismatched."
        )
    return [
        replace(example, mismatched=renderer.encode(mismatched(one, _partner(episodes, index)), max_length))
        for index, (example, one) in enumerate(zip(examples, episodes, strict=True))
    ]


def _partner(episodes: Sequence[Trajectory], index: int) -> Trajectory:
    """The last episode before it of another task; before the first comes the last."""
    own = episodes[index].task.id
    before = (episodes[index - step] for step in range(1, len(episodes)))
    return next(one for one in before if one.task.id != own)


def sequences_of(examples: Sequence[Example]) -> list[Encoded]:
    """All that a reference is asked of examples: their sides, then their mismatched rows."""
    return [*sides(examples), *(one.mismatched for one in examples if one.mismatched is not None)]


def with_logprobs(examples: Sequence[Example], name: str, logprobs: Sequence[Tensor]) -> list[Example]:
    """The examples with log-probabilities of `sequences_of` them, in nats, as `name` says: reference or proximal."""
    found = iter(logprobs)
    each = [replace(one, **{name: tuple(next(found) for _ in one.sides)}) for one in examples]  # type: ignore[arg-type]
    return [one if one.mismatched is None else replace(one, mismatched_reference=next(found)) for one in each]


@torch.no_grad()
def mismatches(loss: Any, model: Any, packs: Sequence[Batch]) -> list[float]:
    """The numbers that a loss reads of mismatched rows under the policy as it is now, one a row; see `Loss`.

    A pack of no row is computed and gives none.
    """
    found: list[float] = []
    for pack in packs:
        logprobs, _ = logprobs_and_entropy(model, pack)
        if "reference" not in pack:
            continue
        side = TurnLogprobs(logprobs, pack["reference"], pack["turn"], pack["trajectory"])
        found += loss.mismatch(side).tolist()
    return found
