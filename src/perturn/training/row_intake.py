"""Rows that training is given, as examples: all bad ones are named at once, and what nothing reads is said aloud."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from perturn.errors import MOST_REFUSED, DataError, ModelError, refusal
from perturn.formats.read_rows import Row, Tally, open_rows, own_row, told
from perturn.formats.row_sources import Location
from perturn.policy.examples import Example, check_lengths, warn_of_changes
from perturn.training.sampled_rows import as_row, unbroken

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
    """Rows with their number and place, whether Arrow holds them, and the unit of a place.

    Rows of Perturn's own form are read.
    """
    if isinstance(rows, str | os.PathLike):
        source = open_rows(rows)
        found = (((each.number, each.label), each.value) for each in source.read())
        return ((where, _own(row)) for where, row in found), source.filled, source.unit
    given = (((index, str(index)), row) for index, row in enumerate(rows))
    return ((where, _own(row)) for where, row in given), _comes_from_arrow(rows), "row"


def _own(row: Any) -> Any:
    """A row of Perturn's own, read, or what is wrong with it; any other as it is."""
    try:
        return own_row(row) or row
    except DataError as error:
        return error


def _comes_from_arrow(rows: object) -> bool:
    """Whether rows are of a `datasets` data set, which fills in None for each key that a row lacks."""
    return any(kind.__module__.partition(".")[0] == "datasets" for kind in type(rows).__mro__)
