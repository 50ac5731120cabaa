"""Show the weight of each token, so that masks can be checked before training."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice, zip_longest
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console
from rich.text import Text

from perturn.audit.audit_text import named, say_shapes
from perturn.audit.audit_text import refused as refused_text
from perturn.audit.training_view import View, credit_file, recipe_of, totals, view_of
from perturn.chat.tokens import NO_TURN, Encoded
from perturn.config.stages import makes
from perturn.data.group_account import CreditRow, read_credits
from perturn.data.run_paths import RunPaths
from perturn.errors import DataError, ModelError, PerturnError, check_fit, required
from perturn.formats.json_stream import Record
from perturn.formats.read_rows import Row, Tally, open_rows, read_branches, read_each, sides_of
from perturn.formats.row_sources import Source
from perturn.io.plain_data import visible
from perturn.policy.examples import Example, encode_example
from perturn.table import locate
from perturn.types import Trajectory, WeightedTrajectory, failed

_NEXT = "\n--- the next turn, as the policy saw it ---\n"

_STYLES = {
    "high": "bold white on dark_red",
    "low": "black on light_goldenrod2",
    "one": "black on pale_green3",
}


def inspect_json(
    data: Path,
    model: str,
    max_length: int | None = None,
    limit: int | None = None,
    chat_template: str | None = None,
    loss_name: str | None = None,
) -> Iterator[str]:
    """Yield a JSON object for each row, with each side's tokens, their roles and turns, and whether they carry loss.

    With a loss, each token that carries loss also has the `confidence` and the `weight` of its turn, and its `clip` if
    the credit sets clip ranges. The model then computes every row that is shown.

    If the policy saw a shortened history, each turn is a separate sequence. Each token then has the number of its
    `sequence`.

    A row that training would reject gives an object with its number as `row`, and the `reason`.

    Raises:
        DataError: After the last row, if rows were rejected. The message names them.
    """
    _check_limit(limit)
    view = view_of(data, model, loss_name, max_length, chat_template)
    weigh = _weigher(model, view, known=bool(_given(data, view))) if loss_name else None
    source = open_rows(_file(data))
    refused: list[dict[str, Any]] = []
    is_empty, left_out = limit != 0, Counter[str]()
    for record, found in islice(_encoded(source, data, view, left_out=left_out), limit):
        is_empty = False
        if isinstance(found, PerturnError):
            refused.append(refused_text(record, str(found)))
            yield json.dumps(refused[-1])
            continue
        weights = weigh(found) if weigh else [{} for _ in found.sides]
        sides = zip(found.sides, weights, _clips(found), strict=True)
        tokens = [_tokens(*each, view.tokenizer) for each in sides]
        yield json.dumps(dict(zip_longest(("chosen", "rejected"), tokens, fillvalue=[])))
    _refuse(source, refused, empty=is_empty and not left_out)


def _encoded(
    source: Source,
    data: Path,
    view: View,
    tally: Tally | None = None,
    left_out: Counter[str] | None = None,
) -> Iterator[tuple[Record, Example | PerturnError]]:
    """Yield each record with its encoded row and weights, or with the error that would make training reject the row.

    Rows with a FAILED episode are left out, as in training, and rows that a run does not train on and that have no
    tokens. They are counted in `left_out`, by the bin of the run's ledger.
    """
    given, left_out = _given(data, view), Counter() if left_out is None else left_out
    for record, row in _numbered(source, view, tally):
        if not isinstance(row, DataError) and any(map(failed, sides_of(row))):
            left_out["failed"] += 1
            continue
        own: CreditRow | WeightedTrajectory | None = None
        try:
            if isinstance(row, DataError):
                raise row
            if isinstance(row, WeightedTrajectory):
                own = row
            elif isinstance(row, Trajectory):
                own = given.get(row.key)
            example = encode_example(
                row, view.renderer, view.max_length, view.shared_prefix, own_turns=view.own_turns
            )
            yield (
                record,
                locate("perturn.training.sampled_rows:with_weight")(example, own.weight, own.clip)
                if own
                else example,
            )
        except (DataError, ModelError) as error:
            if isinstance(own, CreditRow) and own.bin != "trained":
                left_out[own.bin] += 1
            else:
                yield record, error


def _numbered(source: Source, view: View, tally: Tally | None) -> Iterator[tuple[Record, Row | DataError]]:
    """Yield each row with its record. Rows of branches follow with the next numbers, if branches are trained on."""
    number = 0
    for record, row in read_each(source, tally):
        number = record.number
        yield record, row
    if file := view.branches:
        for record, row in read_branches(open_rows(file)):
            at = number + record.number
            named_row = DataError(f"{file.name}:{record.label}: {row}") if isinstance(row, DataError) else row
            yield replace(record, number=at, label=str(at)), named_row


def _file(data: Path) -> Path:
    """Return the file of rows to show. For a run, these are the training rows of its newest alignment."""
    paths, recipe = RunPaths(data), recipe_of(data)
    if recipe is None:
        return data
    if makes(recipe, "groups"):
        return paths.trajectories(f"explore{paths.mark}")
    if makes(recipe, "single", "labelled"):
        return paths.outcomes(paths.mark)
    return paths.pairs(paths.mark)


def _given(data: Path, view: View) -> dict[tuple[str, int], CreditRow]:
    """Return the recorded weights of a run's groups, by task and sample; empty for pairs and for other data."""
    file = credit_file(data, view)
    if file is None:
        return {}
    there, reader = (file if file.is_file() else None), "the weights of turns are read from it"
    found = required(there, str(file), reader, f"run `perturn credit {quote(str(data))}`")
    return {row.key: row for row in read_credits(found)}


def _refuse(source: Source, refused: list[dict[str, Any]], empty: bool) -> None:
    """Raise a DataError if a source has rejected rows, or no rows."""
    if refused:
        raise DataError(named(source, refused))
    if empty:
        raise DataError(f"{source.name} holds no row ({source.shape}); give rows to train on.")


def _check_limit(limit: int | None) -> None:
    check_fit(limit is None or limit >= 0, "limit", "be >= 0", limit)


def _weigher(model: str, view: View, known: bool) -> Any:
    """Return the function that weighs a row; see `turn_weigher`. `known` says whether all rows have weights."""
    credit = None if known else locate("perturn.training.credit_choice:credit_of")(view.loss, view.credit)
    return locate("perturn.policy.credit_weights:turn_weigher")(model, credit)


def _clips(example: Example) -> list[dict[int, float]]:
    """Return the factors on the clip range of each side's turns; they are empty if the credit sets none."""
    clips = [side.tolist() for side in example.clip] or [[]] * len(example.sides)
    turns = (sorted(set(side.loss_turns)) for side in example.sides)
    return [dict(zip(of_turns, clip, strict=False)) for of_turns, clip in zip(turns, clips, strict=True)]


def _tokens(
    side: Encoded, weights: dict[int, tuple[float, float]], clips: dict[int, float], tokenizer: Any
) -> list[dict[str, Any]]:
    """Return each token of a side; see `inspect_json`. Turns without an entry in `weights` or `clips` have none."""
    return [
        {
            "id": token,
            "text": tokenizer.decode([token]),
            "role": role,
            "turn": None if turn == NO_TURN else turn,
            "loss": turn != NO_TURN,
            **({"sequence": number} if len(side.starts) > 1 else {}),
            **(dict(zip(("confidence", "weight"), weights[turn], strict=True)) if turn in weights else {}),
            **({"clip": clips[turn]} if turn in weights and turn in clips else {}),
        }
        for number, span in enumerate(side.sequences)
        for token, role, turn in zip(side.ids[span], side.role[span], side.turn[span], strict=True)
    ]


def inspect(
    data: Path,
    model_name: str,
    loss_name: str | None,
    console: Console,
    max_length: int | None = None,
    limit: int = 3,
    chat_template: str | None = None,
) -> None:
    """Print rows in colour as they are read, with the confidence and weight of each turn, and then totals.

    Args:
        data: Rows from any source, or a run folder.
        model_name: Reference policy and tokenizer.
        loss_name: Loss whose turn weights are shown. None: the run's loss, or else tlm-dre.
        console: Console for the output.
        max_length: Length limit in tokens, as in training.
        limit: Maximum number of rows to print. Totals include all rows.
        chat_template: Name, file or Jinja text of a chat template. None: the run's chat template, or else the
            tokenizer's.

    Raises:
        ConfigError: If the loss does not exist.
        DataError: After the output, if training would reject rows. The message names them.
    """
    _check_limit(limit)
    view = view_of(data, model_name, loss_name, max_length, chat_template)
    weigh = _weigher(model_name, view, known=bool(_given(data, view)))
    source, tally, left_out = open_rows(_file(data)), Tally(), Counter[str]()
    counts, longest, refused = Counter[str](), 0, []
    for record, example in _encoded(source, data, view, tally, left_out):
        if isinstance(example, PerturnError):
            refused.append(refused_text(record, str(example)))
            continue
        if counts["rows"] < limit:
            parts = zip(("chosen", "rejected"), example.sides, weigh(example), _clips(example), strict=False)
            for name, side, weights, factors in parts:
                of_pair = f" {name}" if len(example.sides) > 1 else ""
                console.rule(Text(visible(f"{source.unit} {record.label}{of_pair}")))
                console.print(_coloured(side, weights, factors, view.tokenizer))
        counts.update(_counts(example))
        longest = max(longest, *(side.longest for side in example.sides))
    if counts:
        _legend(console)
        say_shapes(source, tally, console)
        _say_counts(console, counts, longest)
    if left_out:
        named_bins = ", ".join(f"{name} {count}" for name, count in left_out.items())
        console.print(Text(visible(f"rows left out: {named_bins}")))
    _refuse(source, refused, empty=not (counts or refused or left_out))


def _coloured(
    side: Encoded, weights: dict[int, tuple[float, float]], clips: dict[int, float], tokenizer: Any
) -> Text:
    text = Text()
    values = [weight for _, weight in weights.values()]
    highest, lowest = max(values), min(values)
    last, starts = NO_TURN, set(side.starts[1:])
    for index, (token, turn) in enumerate(zip(side.ids, side.turn, strict=True)):
        if index in starts:
            text.append(_NEXT, style="cyan")
        piece = visible(tokenizer.decode([token]))
        if turn == NO_TURN:
            text.append(piece, style="dim")
        else:
            confidence, weight = weights[turn]
            if turn != last:
                clip = f" clip={clips[turn]:.2g}" if turn in clips else ""
                text.append(f"[{turn}: p={confidence:.2f} w={weight:.2g}{clip}]", style="cyan")
            kind = _kind(weight, lowest, highest)
            text.append(piece.replace("\n", "⏎\n"), style=_STYLES[kind])
        last = turn
    return text


def _kind(weight: float, lowest: float, highest: float) -> str:
    """Return the style of a weight: by its sign for advantages, else by whether it is the highest weight."""
    if lowest < 0:
        return "high" if weight > 0 else "low" if weight < 0 else "one"
    return "one" if highest == lowest else "high" if weight == highest else "low"


def _legend(console: Console) -> None:
    console.print(
        Text.assemble(
            ("no loss", "dim"),
            "  ",
            ("highest weight, or positive advantage", _STYLES["high"]),
            "  ",
            ("lower weight, or negative advantage", _STYLES["low"]),
            "  ",
            ("equal weights, or weight 0", _STYLES["one"]),
            "  [turn: p=confidence w=weight clip=factor on the clip range, if the credit sets one]",
        )
    )


def _counts(example: Example) -> dict[str, int]:
    """Return the counts of a row for `_say_counts`."""
    return {
        "rows": 1,
        **totals([example]),
        "dropped": sum(side.dropped_turns for side in example.sides),
        "quoted": sum(side.quoted_turns for side in example.sides),
    }


def _say_counts(console: Console, counts: Mapping[str, int], longest: int) -> None:
    """Print the sums of the counts of all rows, and the largest number of tokens."""
    console.print(
        f"{counts['rows']} rows, {counts['trajectories']} trajectories, {counts['turns']} turns; "
        f"{counts['tokens']} tokens, {counts['loss_tokens']} carry loss "
        f"({counts['loss_tokens'] / max(counts['tokens'], 1):.1%}); "
        f"longest {longest} tokens; {counts['dropped']} turns dropped by the length limit"
    )
    if counts["quoted"]:
        console.print(
            f"{counts['quoted']} actions hold control tokens as text, which are read as plain text (see --check)"
        )
