"""Mismatched rows: the actions of one after the prompt of another, from which KTO has its reference point."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from perturn.chat.tokens import Encoded, Renderer
from perturn.errors import DataError
from perturn.losses import TurnLogprobs
from perturn.losses.protocol import MismatchedLoss
from perturn.losses.token_inputs import PolicyInput
from perturn.policy.examples import Example, sides
from perturn.policy.logprobs import logprobs_and_inputs
from perturn.policy.packing import OTHERS, Batch, inputs_of
from perturn.types import Trajectory, WeightedTrajectory


def mismatched(prompt: Trajectory, actions: Trajectory) -> Trajectory:
    """An episode as it was played, after the prompt and the observation that posed another one's task."""
    first = replace(
        actions.turns[0], observation=prompt.turns[0].observation, recalled=prompt.turns[0].recalled
    )
    turns = (first, *actions.turns[1:])
    variables = prompt.template_kwargs
    return replace(actions, prompt=prompt.prompt, tools=prompt.tools, template_kwargs=variables, turns=turns)


def with_mismatched(
    examples: Sequence[Example],
    rows: Sequence[WeightedTrajectory],
    renderer: Renderer,
    max_length: int | None,
) -> list[Example]:
    """The examples, each after its own prompt with the actions of the last row before it that has another prompt.

    Before the first row comes the last. A prompt is all that comes before the first action.

    Raises:
        DataError: If all rows have one prompt, or the actions of a row do not fit after the prompt of another.
    """
    episodes = [row.trajectory for row in rows]
    partners = [episodes[partner] for partner in _partners([_posed(one) for one in episodes])]
    pairs = zip(examples, episodes, partners, strict=True)
    return [
        replace(example, mismatched=_encoded(one, partner, renderer, max_length))
        for example, one, partner in pairs
    ]


def _encoded(prompt: Trajectory, actions: Trajectory, renderer: Renderer, max_length: int | None) -> Encoded:
    """A mismatched row as tokens."""
    encoded = renderer.encode(mismatched(prompt, actions), max_length)
    if not encoded.turns:
        raise DataError(
            f"the loss reads the actions of task {actions.task.id!r:.80} after the prompt of task "
            f"{prompt.task.id!r:.80}, and no turn that carries loss fits {max_length} tokens there; raise max_length, "
            "or remove the row with the long prompt."
        )
    return encoded


def _posed(episode: Trajectory) -> str:
    """All that comes before the first action, as one text."""
    posed = [episode.prompt, episode.tools, episode.template_kwargs, episode.turns[0].observation]
    return json.dumps(posed, sort_keys=True)


def _partners(posed: Sequence[str]) -> list[int]:
    """For each text the index of the last one before it that differs; before the first comes the last."""
    last = next((index for index in reversed(range(len(posed))) if posed[index] != posed[-1]), None)
    if last is None:
        raise DataError(
            "the loss needs rows with at least two prompts, so that prompts and actions can be mismatched."
        )
    found = [len(posed) - 1 if posed[0] != posed[-1] else last]
    for index in range(1, len(posed)):
        found.append(found[-1] if posed[index] == posed[index - 1] else index - 1)
    return found


def sequences_of(examples: Sequence[Example]) -> list[Encoded]:
    """All that a reference is asked of examples: their sides, then their mismatched rows."""
    return [*sides(examples), *(one.mismatched for one in examples if one.mismatched is not None)]


def with_logprobs(examples: Sequence[Example], name: str, logprobs: Sequence[Tensor]) -> list[Example]:
    """The examples with log-probabilities of `sequences_of` them, in nats, as `name` says.

    It is reference, proximal, or the name of an input of the loss.
    """
    found, made = iter(logprobs), []
    for one in examples:
        of_sides = tuple(next(found) for _ in one.sides)
        of_input = {"inputs": {**one.inputs, name: of_sides}}
        made.append(replace(one, **({name: of_sides} if name in OTHERS else of_input)))
    return [
        replace(one, mismatched_logprobs={**one.mismatched_logprobs, name: next(found)})
        if one.mismatched is not None
        else one
        for one in made
    ]


@torch.no_grad()
def mismatches(
    loss: MismatchedLoss, model: Any, packs: Sequence[Batch], inputs: Mapping[str, PolicyInput]
) -> list[float]:
    """The numbers that a loss reads of mismatched rows under the policy as it is now, one a row.

    Args:
        loss: The loss.
        model: The policy.
        packs: Mismatched rows; a pack of no row is computed and gives none.
        inputs: Per-token inputs that the loss reads of the policy, by name.
    """
    found: list[float] = []
    for pack in packs:
        logprobs, _, read = logprobs_and_inputs(model, pack, inputs)
        if "pairs" in pack:  # of no row
            continue
        read |= inputs_of(pack)
        side = TurnLogprobs(logprobs, pack.get("reference"), pack["turn"], pack["trajectory"], inputs=read)
        found += loss.mismatch(side).tolist()
    return found
