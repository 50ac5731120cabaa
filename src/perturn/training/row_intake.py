"""Conversion of training rows into examples; errors name unusable rows before the first optimizer step."""

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
from perturn.formats.read_rows import Row, Tally, notes_on, open_rows, own_row, whole_records
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
    tokenizer: Any,
    max_length: int | None,
    context: int | None = None,
) -> tuple[list[Example], list[Row]]:
    """Read and tokenize rows.

    Args:
        rows: Rows in any format that training accepts; or a file or folder of rows, or a dataset of the Hub.
        name: Name of the dataset, for messages.
        loss: The loss, which determines the kind of rows.
        encode: Function that converts a row into tokens.
        tokenizer: Tokenizer of `encode`, for messages.
        max_length: Length limit of `encode` in tokens, for messages.
        context: Context length of the model in tokens; None: no limit.

    Returns:
        The examples, and the rows from which they were made.

    Raises:
        DataError: If there are no rows, rows cannot be read or tokenized, or a row is longer than the context. The
            message names the rows and gives each reason once.
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
        except (DataError, ModelError) as error:  # a chat template may reject a row
            refused.append((label, str(error)))
            if len(refused) == MOST_REFUSED:
                break
    if refused:
        raise DataError(refusal(name, refused, unit))
    if not encoded:
        raise DataError(f"the {name} dataset is empty; give at least one row.")
    check_lengths(encoded, context, names)
    for said in notes_on(tally):
        _logger.warning("%s: %s", name, said)
    warn_of_changes(name, encoded, max_length, tokenizer)
    return encoded, taken


def _located(rows: Iterable[Any] | Location) -> tuple[Iterator[tuple[tuple[int, str], Any]], bool, str]:
    """Return rows with their locations; rows in Perturn's own format are parsed.

    Returns:
        Pairs of location and row, where a location is (index, label). Whether the rows come from Arrow. The unit of a
        label, such as `row` or `line`.
    """
    if isinstance(rows, str | os.PathLike):
        source = open_rows(rows)
        found = (((each.number, each.label), each.value) for each in whole_records(source))
        return ((where, _own(row)) for where, row in found), source.filled, source.unit
    given = (((index, str(index)), row) for index, row in enumerate(rows))
    return ((where, _own(row)) for where, row in given), _comes_from_arrow(rows), "row"


def _own(row: Any) -> Any:
    """Parse a row in Perturn's own format and return it, or its error; return any other row unchanged."""
    try:
        return own_row(row) or row
    except DataError as error:
        return error


def _comes_from_arrow(rows: object) -> bool:
    """Return whether rows are a dataset of the package `datasets`, which adds missing keys to rows as None."""
    return any(kind.__module__.partition(".")[0] == "datasets" for kind in type(rows).__mro__)


def mismatched(prompt: Trajectory, actions: Trajectory) -> Trajectory:
    """Return an episode whose prompt and first observation are replaced by another episode's.

    Args:
        prompt: Episode that gives the prompt, the tools and the first observation.
        actions: Episode that gives the turns.
    """
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
    """Return the examples, each with a mismatched row: its own prompt, followed by another row's actions.

    The actions come from the nearest earlier row with another prompt; the row before the first row is the last row. A
    prompt is everything before the first action.

    Raises:
        DataError: If all rows have the same prompt, or the actions of a row do not fit after another row's prompt.
    """
    episodes = [row.trajectory for row in rows]
    partners = [episodes[partner] for partner in _partners([_posed(one) for one in episodes])]
    pairs = zip(examples, episodes, partners, strict=True)
    return [
        replace(example, mismatched=_encoded(one, partner, renderer, max_length))
        for example, one, partner in pairs
    ]


def _encoded(prompt: Trajectory, actions: Trajectory, renderer: Renderer, max_length: int | None) -> Encoded:
    """Encode a mismatched row as tokens; see `mismatched` for the arguments.

    Raises:
        DataError: If no turn that carries loss fits the length limit.
    """
    encoded = renderer.encode(mismatched(prompt, actions), max_length)
    if not encoded.turns:
        raise DataError(
            f"the loss reads the actions of task {actions.task.id!r:.80} after the prompt of task "
            f"{prompt.task.id!r:.80}, and no turn that carries loss fits {max_length} tokens there; raise max_length, "
            "or remove the row with the long prompt."
        )
    return encoded


def _posed(episode: Trajectory) -> str:
    """Return everything before the first action of an episode, as one text."""
    posed = [episode.prompt, episode.tools, episode.template_kwargs, episode.turns[0].observation]
    return json.dumps(posed, sort_keys=True)


def _partners(posed: Sequence[str]) -> list[int]:
    """Return, for each text, the index of the nearest earlier text that differs; the last text precedes the first.

    Raises:
        DataError: If all texts are equal.
    """
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
    """Return the sequences for which frozen policies compute log-probabilities: all sides, then all mismatched rows."""
    return [*sides(examples), *(one.mismatched for one in examples if one.mismatched is not None)]


def with_logprobs(examples: Sequence[Example], name: str, logprobs: Sequence[Tensor]) -> list[Example]:
    """Return the examples with log-probabilities of their sequences under a frozen policy.

    Args:
        examples: The examples.
        name: `reference`, `proximal`, or the name of an input of the loss.
        logprobs: Log-probabilities of each sequence from `sequences_of`, in nats [loss tokens].
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
        compute: Function from a pack to three results: log-probabilities of its loss tokens under the policy, an
            ignored result, and the loss's additional inputs by name.
        packs: Packs of mismatched rows. An empty pack is computed too, but gives no inputs.
    """
    found: list[float] = []
    for pack in packs:
        logprobs, _, read = compute(pack)
        if "pairs" in pack:  # an empty pack
            continue
        read |= inputs_of(pack)
        side = TurnLogprobs(logprobs, pack.get("reference"), pack["turn"], pack["trajectory"], inputs=read)
        found += loss.mismatch(side).tolist()
    return found
