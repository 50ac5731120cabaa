"""Rows that training is given, as examples: all bad ones are named at once, and what nothing reads is said aloud."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from perturn.data.trl import told_unread
from perturn.errors import MOST_REFUSED, DataError, ModelError, refusal
from perturn.policy.examples import Example, check_lengths, warn_of_changes
from perturn.policy.sampled import Row, as_row, unbroken

_logger = logging.getLogger(__name__)


def take_rows(
    rows: Iterable[Any],
    name: str,
    loss: Any,
    encode: Callable[[Row], Example],
    max_length: int | None,
    context: int | None = None,
) -> tuple[list[Example], list[Row]]:
    """Read and tokenize rows.

    Args:
        rows: Rows in any of the forms that training takes.
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
    refused: list[tuple[int, str]] = []
    counts, filled = Counter[str](), _comes_from_arrow(rows)
    for index, row in unbroken(rows, name, loss):
        try:
            parsed = as_row(row, index, loss, counts, filled=filled)
            encoded.append(encode(parsed))
            taken.append(parsed)
            names.append(f"{name} row {index}")
        except (DataError, ModelError) as error:  # a template may refuse a row
            refused.append((index, str(error)))
            if len(refused) == MOST_REFUSED:
                break
    if refused:
        raise DataError(refusal(name, refused))
    if not encoded:
        raise DataError(f"the {name} dataset is empty; give at least one row.")
    check_lengths(encoded, context, names)
    if unread := told_unread(counts):
        _logger.warning("%s: %s", name, unread)
    warn_of_changes(name, encoded, max_length)
    return encoded, taken


def _comes_from_arrow(rows: object) -> bool:
    """Whether rows are of a `datasets` data set, which fills in None for each key that a row lacks."""
    return any(kind.__module__.partition(".")[0] == "datasets" for kind in type(rows).__mro__)
