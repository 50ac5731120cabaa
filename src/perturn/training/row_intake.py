"""Rows that training is given, as examples; rows that training cannot use are named before the first step."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from perturn.chat.tokens import Encoded, Renderer
from perturn.errors import MOST_REFUSED, DataError, ModelError, refusal
from perturn.formats.read_rows import Row, Tally, open_rows, own_row, told
from perturn.formats.row_sources import Location
from perturn.losses import TurnLogprobs
from perturn.losses.protocol import MismatchedLoss
from perturn.policy.examples import Example, check_lengths, sides, warn_of_changes
from perturn.policy.packing import OTHERS, Batch, inputs_of
from perturn.training.sampled_rows import as_row, unbroken
from perturn.types import Trajectory, WeightedTrajectory

_logger = logging.getLogger(__name__)


def take_rows(
    rows: Iterable[Any] | Location,
    name: str,
    loss: Any,
    encode: Callable[[Row], Example],
    max_length: int | None,
    context: int | None = None,
) -> tuple[list[Example], list[Row]]:
    """Read and tokenize rows.

    Args:
        rows: Rows in any of the forms that training takes; or a file or folder of them, or a data set of the Hub.
        name: Name of the data set, for messages.
        loss: What the rows are for.
        encode: A row as tokens.
        max_length: Length limit that `encode` keeps, for messages.
        context: Most tokens of a sequence that the model takes; None: any number.

    Returns:
        The examples, and the rows that they are of.

    Raises:
        DataError: If there is no row, or naming the rows that cannot be read or tokenized, each reason once; or naming
            the longest row, if the model does not take it.
    """
    if isinstance(rows, Mapping):
        raise DataError(
            f"the {name} dataset is a dict, got the keys {list(rows)!r:.200}; give one of its sets."
        )
    encoded: list[Example] = []
    names: list[str] = []
    taken: list[Row] = []
    refused: list[tuple[str, str]] = []
    located, filled, unit = _located(rows)
    if isinstance(rows, str | os.PathLike):
        name = f"{name} ({os.fspath(rows)})"
    tally = Tally()
    for (index, label), row in unbroken(located, name, loss):
        try:
            parsed = as_row(row, index, loss, tally, filled=filled)
            encoded.append(encode(parsed))
            taken.append(parsed)
            names.append(f"{name} {unit} {label}")
        except (DataError, ModelError) as error:  # a template may refuse a row
            refused.append((label, str(error)))
            if len(refused) == MOST_REFUSED:
                break
    if refused:
        raise DataError(refusal(name, refused, unit))
    if not encoded:
        raise DataError(f"the {name} dataset is empty; give at least one row.")
    check_lengths(encoded, context, names)
    for said in told(tally):
        _logger.warning("%s: %s", name, said)
    warn_of_changes(name, encoded, max_length)
    return encoded, taken


def _located(rows: Iterable[Any] | Location) -> tuple[Iterator[tuple[tuple[int, str], Any]], bool, str]:
    """Return rows with their number and place, whether Arrow holds them, and the unit of a place.

    Rows of Perturn's own form are read.
    """
    if isinstance(rows, str | os.PathLike):
        source = open_rows(rows)
        found = (((each.number, each.label), each.value) for each in source.read())
        return ((where, _own(row)) for where, row in found), source.filled, source.unit
    given = (((index, str(index)), row) for index, row in enumerate(rows))
    return ((where, _own(row)) for where, row in given), _comes_from_arrow(rows), "row"


def _own(row: Any) -> Any:
    """Return a row of Perturn's own format, parsed, or its error; any other row unchanged."""
    try:
        return own_row(row) or row
    except DataError as error:
        return error


def _comes_from_arrow(rows: object) -> bool:
    """Return whether rows are of a `datasets` data set, which fills in None for each key that a row lacks."""
    return any(kind.__module__.partition(".")[0] == "datasets" for kind in type(rows).__mro__)


def mismatched(prompt: Trajectory, actions: Trajectory) -> Trajectory:
    """Return an episode in the order it was played, after the prompt and the observation of another episode's task."""
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
    """Return the examples; each continues its own prompt, with the actions of the last row that has another prompt.

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
    """Return a mismatched row as tokens."""
    encoded = renderer.encode(mismatched(prompt, actions), max_length)
    if not encoded.turns:
        raise DataError(
            f"the loss reads the actions of task {actions.task.id!r:.80} after the prompt of task "
            f"{prompt.task.id!r:.80}, and no turn that carries loss fits {max_length} tokens there; raise max_length, "
            "or remove the row with the long prompt."
        )
    return encoded


def _posed(episode: Trajectory) -> str:
    """Return all that comes before the first action, as one text."""
    posed = [episode.prompt, episode.tools, episode.template_kwargs, episode.turns[0].observation]
    return json.dumps(posed, sort_keys=True)


def _partners(posed: Sequence[str]) -> list[int]:
    """Return for each text the index of the last different text before it; before the first comes the last."""
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
    """Return all that a reference is asked of examples: their sides, then their mismatched rows."""
    return [*sides(examples), *(one.mismatched for one in examples if one.mismatched is not None)]


def with_logprobs(examples: Sequence[Example], name: str, logprobs: Sequence[Tensor]) -> list[Example]:
    """Return the examples with log-probabilities of their `sequences_of`, in nats, under the key `name`.

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
    loss: MismatchedLoss,
    compute: Callable[[Batch], tuple[Tensor, Any, dict[str, Tensor]]],
    packs: Sequence[Batch],
) -> list[float]:
    """Return the inputs of a loss for mismatched rows under the current policy, one per row.

    Args:
        loss: The loss.
        compute: Computes, from a pack, the log-probabilities of its loss tokens under the policy, a further result, and
            the inputs that the loss reads besides, by name.
        packs: Mismatched rows; a pack of no row is computed and gives none.
    """
    found: list[float] = []
    for pack in packs:
        logprobs, _, read = compute(pack)
        if "pairs" in pack:  # of no row
            continue
        read |= inputs_of(pack)
        side = TurnLogprobs(logprobs, pack.get("reference"), pack["turn"], pack["trajectory"], inputs=read)
        found += loss.mismatch(side).tolist()
    return found
