"""Show which token carries which weight: the audit of masks before a GPU hour is spent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from perturn.config import build
from perturn.errors import ConfigError, DataError, ModelError
from perturn.inspect.rows import read_rows
from perturn.losses import LOSSES, TurnLogprobs
from perturn.policy.examples import Example, encode_example
from perturn.policy.logprobs import action_logprobs, loss_turns
from perturn.policy.models import load_model, load_tokenizer
from perturn.policy.packing import lay_out
from perturn.policy.tokens import NO_TURN, Encoded, Renderer

_STYLES = {
    "high": "bold white on dark_red",
    "low": "black on light_goldenrod2",
    "one": "black on pale_green3",
}


def inspect_json(
    data: Path, model: str, max_length: int | None = None, limit: int | None = None
) -> Iterator[str]:
    """One JSON object a row: the tokens of each side with role, turn and whether they carry loss."""
    _check_limit(limit)
    tokenizer = load_tokenizer(model)
    renderer = Renderer(tokenizer)
    for example in islice(_encoded(data, renderer, max_length), limit):
        sides = {"chosen": example.chosen, "rejected": example.rejected}
        yield json.dumps({name: _tokens(side, tokenizer) if side else [] for name, side in sides.items()})


def _encoded(data: Path, renderer: Renderer, max_length: int | None) -> Iterator[Example]:
    for number, row in enumerate(read_rows(data), start=1):
        try:
            yield encode_example(row, renderer, max_length)
        except (DataError, ModelError) as error:
            raise type(error)(f"{data}: row {number}: {error}") from error


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 0:
        raise ConfigError(f"limit must be >= 0, got {limit}.")


def _tokens(side: Encoded, tokenizer: Any) -> list[dict[str, Any]]:
    return [
        {
            "id": token,
            "text": tokenizer.decode([token]),
            "role": role,
            "turn": None if turn == NO_TURN else turn,
            "loss": turn != NO_TURN,
        }
        for token, role, turn in zip(side.ids, side.role, side.turn, strict=True)
    ]


def inspect(
    data: Path,
    model_name: str,
    loss_name: str,
    console: Console,
    max_length: int | None = None,
    limit: int = 3,
) -> None:
    """Print rows in colour, each turn with its confidence and weight, and totals.

    Args:
        data: JSONL file or run folder.
        model_name: Reference policy and tokenizer.
        loss_name: Loss whose turn weights are shown.
        console: Where to print.
        max_length: As in training.
        limit: Rows to print; totals count all rows.

    Raises:
        ConfigError: If there is no such loss.
    """
    loss = build(LOSSES, {"name": loss_name}, "loss")
    _check_limit(limit)
    tokenizer = load_tokenizer(model_name)
    renderer = Renderer(tokenizer)
    examples = list(_encoded(data, renderer, max_length))
    model = load_model(model_name) if limit else None
    for number, example in enumerate(examples[:limit]):
        for name, side in zip(("chosen", "rejected"), example.sides, strict=False):
            console.rule(f"row {number} {name}")
            console.print(_coloured(side, _weights(model, side, loss), tokenizer))
    _legend(console)
    _totals(console, examples)


def _weights(model: Any, side: Encoded, loss: Any) -> list[tuple[float, float]]:
    """(confidence, weight) of each turn."""
    known = model.get_input_embeddings().num_embeddings
    if max(side.ids) >= known:
        raise DataError(
            f"token id {max(side.ids)} is none of the model, which knows {known}; name the model that sampled the rows."
        )
    batch = lay_out([side])
    with torch.no_grad():
        logprobs = action_logprobs(model, batch)
    both = TurnLogprobs(logprobs, logprobs, *loss_turns(batch))
    return list(zip(both.confidence().tolist(), loss.turn_weights(both).tolist(), strict=True))


def _coloured(side: Encoded, weights: list[tuple[float, float]], tokenizer: Any) -> Text:
    text = Text()
    highest, lowest = max(weight for _, weight in weights), min(weight for _, weight in weights)
    last = NO_TURN
    for token, turn in zip(side.ids, side.turn, strict=True):
        piece = tokenizer.decode([token])
        if turn == NO_TURN:
            text.append(piece, style="dim")
        else:
            confidence, weight = weights[turn]
            if turn != last:
                text.append(f"[{turn}: p={confidence:.2f} w={weight:.2g}]", style="cyan")
            kind = "one" if highest == lowest else "high" if weight == highest else "low"
            text.append(piece.replace("\n", "⏎\n"), style=_STYLES[kind])
        last = turn
    return text


def _legend(console: Console) -> None:
    console.print(
        Text.assemble(
            ("no loss", "dim"),
            "  ",
            ("highest weight", _STYLES["high"]),
            "  ",
            ("lower weight", _STYLES["low"]),
            "  ",
            ("one weight for all", _STYLES["one"]),
            "  [turn: p=confidence w=weight]",
        )
    )


def _totals(console: Console, examples: list[Example]) -> None:
    found = [side for example in examples for side in example.sides]
    tokens = sum(len(side.ids) for side in found)
    carrying = sum(turn != NO_TURN for side in found for turn in side.turn)
    console.print(
        f"{len(examples)} rows, {len(found)} trajectories, {sum(side.turns for side in found)} turns; "
        f"{tokens} tokens, {carrying} carry loss ({carrying / max(tokens, 1):.1%}); "
        f"longest {max((len(side.ids) for side in found), default=0)} tokens; "
        f"{sum(side.dropped_turns for side in found)} turns dropped by the length limit"
    )
