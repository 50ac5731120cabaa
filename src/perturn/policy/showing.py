"""Confidence and weight of the turns of a few rows, computed as training computes them, to be shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from perturn.credit import Credit
from perturn.errors import DataError
from perturn.policy.models import load_model
from perturn.policy.reference import compute_logprobs
from perturn.policy.tokens import NO_TURN, Example
from perturn.policy.weighing import turn_logprobs, weigh

Turns = dict[int, tuple[float, float]]
"""(confidence, weight) by turn."""


def turn_weights(model_name: str, examples: Sequence[Example], credit: Credit) -> Iterator[list[Turns]]:
    """Those of each turn that carries loss: one list a row, with one entry a side.

    Args:
        model_name: Reference policy; loaded if there is a row.
        examples: The rows.
        credit: What weighs.
    """
    model = load_model(model_name) if examples else None
    return (_weights(model, example, credit) for example in examples)


def _weights(model: Any, example: Example, credit: Credit) -> list[Turns]:
    """(confidence, weight) of each turn that carries loss, by side; computed as training computes them."""
    known, largest = model.get_input_embeddings().num_embeddings, max(max(side.ids) for side in example.sides)
    if largest >= known:
        raise DataError(
            f"token id {largest} is none of the model, which knows {known}; name the model that sampled the rows."
        )
    with torch.no_grad():
        example = replace(example, reference=tuple(compute_logprobs(model, example.sides)))
    example = weigh(example, credit)
    found = []
    for index, side in enumerate(example.sides):
        turns = sorted(set(side.turn) - {NO_TURN})
        confidence = [float(turn.mean().exp()) for turn in turn_logprobs(example, index)]
        found.append(
            dict(zip(turns, zip(confidence, example.weight[index].tolist(), strict=True), strict=True))
        )
    return found
