"""Objects of a file that an environment reads, one at a time, each with its place."""

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
"""Half a surrogate pair, which may stand alone."""


def read_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a source of rows (`perturn.formats.row_sources`), each with a place like `corpus.jsonl:3`.

    Raises:
        DataError: If the file cannot be read, or holds anything but objects.
    """
    return ((where, row) for _, where, row in numbered_rows(file))


def numbered_rows(file: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the objects of `read_rows`, each with its number: of its line in JSON lines, else of the row."""
    for record in open_source(file).read():
        if isinstance(record.value, DataError):
            raise DataError(f"{record.where}: {str(record.value).removeprefix('row: ')}")
        yield record.number, record.where, whole(record.value, record.text, record.where)


def text_of(row: Mapping[str, Any], key: str, where: str) -> str:
    """Return the text of a row under a key.

    Raises:
        DataError: If it has none.
    """
    value = row.get(key)
    if isinstance(value, str) and value.strip():
        return value.strip()
    got = f"{value!r:.60}" if key in row else f"the keys {', '.join(map(str, row)) or 'none'}"
    raise DataError(f"{where}: expected a text in {key!r}, got {got}. Add it, or drop the entry.")


def whole(row: _Data, text: str, where: str) -> _Data:
    """Return the data of a JSON text at a place, with U+FFFD for each half of a surrogate pair: no tokenizer takes one.

    A warning names the place if there is any.
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
    """Report a value of the wrong kind."""
    raise DataError(f"{where}: expected {expected}, got {value!r:.60}. Correct it.")
