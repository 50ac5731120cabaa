"""Read the JSON objects of a data file one at a time, each with its position for error messages."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from perturn.errors import DataError
from perturn.formats.row_sources import open_source
from perturn.io.plain_data import is_unicode, mended

_logger = logging.getLogger(__name__)

_Data = TypeVar("_Data")
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""JSON escape of a surrogate, which may lack its other half."""


def read_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the position, such as `corpus.jsonl:3`, and the object of each row of a file.

    `perturn.formats.row_sources` lists the file formats.

    Raises:
        DataError: If the file cannot be read, or a row is not an object.
    """
    return ((where, row) for _, where, row in numbered_rows(file))


def numbered_rows(file: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the number, position and object of each row; in JSON lines, the number is the line number."""
    for record in open_source(file).read():
        if isinstance(record.value, DataError):
            raise DataError(f"{record.where}: {str(record.value).removeprefix('row: ')}")
        yield record.number, record.where, whole(record.value, record.text, record.where)


def text_of(row: Mapping[str, Any], key: str, where: str) -> str:
    """Return the text under a key of a row, without surrounding white space.

    Raises:
        DataError: If the row has no text under the key.
    """
    value = row.get(key)
    if isinstance(value, str) and value.strip():
        return value.strip()
    got = f"{value!r:.60}" if key in row else f"the keys {', '.join(map(str, row)) or 'none'}"
    raise DataError(f"{where}: expected a text in {key!r}, got {got}. Add it, or drop the entry.")


def whole(row: _Data, text: str, where: str) -> _Data:
    """Return the data of a JSON text, with each lone surrogate replaced by U+FFFD, since tokenizers reject surrogates.

    If a surrogate was replaced, a warning names the position `where`.
    """
    if not _HALF.search(text):
        return row
    written = json.dumps(row, ensure_ascii=False)
    if not is_unicode(written):
        _logger.warning(
            "%s: half a surrogate pair is read as U+FFFD; the text was cut in a character.", where
        )
    mended_row: _Data = json.loads(mended(written))
    return mended_row


def refuse(where: str, expected: str, value: object) -> Any:
    """Raise a `DataError` about a value of the wrong type."""
    raise DataError(f"{where}: expected {expected}, got {value!r:.60}. Correct it.")
