"""JSON objects of a file one at a time, whether it is an array or has one on each line; each with its line number."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from perturn.errors import DataError
from perturn.io.plain import is_unicode, mended
from perturn.io.reading import DEEPEST, is_too_deep

_logger = logging.getLogger(__name__)

_Data = TypeVar("_Data")
_SOLID = re.compile(r"[^\s,]")
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Half a surrogate pair, which may stand alone."""
_CHUNK = 1 << 20
_LONGEST = 1 << 26
"""Characters within which an object must end: what is longer is a mistake, and reading on would fill the memory."""


def read_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSON array or of JSON lines, with the place each begins at, such as `corpus.jsonl:3`.

    Raises:
        DataError: If the file cannot be read, or holds anything but objects.
    """
    decoder = json.JSONDecoder()
    buffer, at, line, inside = "", 0, 1, None
    try:
        with file.open(encoding="utf-8-sig") as opened:
            while True:
                found = _SOLID.search(buffer, at)
                begin = found.start() if found else len(buffer)
                line, at = line + buffer.count("\n", at, begin), begin
                if at == len(buffer):
                    buffer, at = opened.read(_CHUNK), 0
                    if not buffer:
                        break
                elif buffer[at] == {None: "[", True: "]"}.get(inside):
                    inside, at = buffer[at] == "[", at + 1
                elif buffer[at] == "{":
                    inside = inside or False
                    row, at, end, buffer = _object(decoder, buffer, at, opened, f"{file}:{line}")
                    yield f"{file}:{line}", row
                    line, at = line + buffer.count("\n", at, end), end
                else:
                    refuse(f"{file}:{line}", "a JSON object", buffer[at : at + 40])
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read: {error}. Correct the path or the file.") from error
    if inside:
        raise DataError(f"{file}:{line}: the array does not end: the file was cut short. Get it again.")


def text_of(row: Mapping[str, Any], key: str, where: str) -> str:
    """The text of a row under a key.

    Raises:
        DataError: If it has none.
    """
    value = row.get(key)
    if isinstance(value, str) and value.strip():
        return value.strip()
    got = f"{value!r:.60}" if key in row else f"the keys {', '.join(map(str, row)) or 'none'}"
    raise DataError(f"{where}: expected a text in {key!r}, got {got}. Add it, or drop the entry.")


def whole(row: _Data, text: str, where: str) -> _Data:
    """The data of a JSON text at a place, with U+FFFD for each half of a surrogate pair: no tokenizer takes one.

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
    """Say that a value is not what it should be."""
    raise DataError(f"{where}: expected {expected}, got {value!r:.60}. Correct it.")


def _object(
    decoder: json.JSONDecoder, text: str, at: int, opened: Any, where: str
) -> tuple[dict[str, Any], int, int, str]:
    """The object at a place of a text, its place and end, and the text with as much more as that took to read."""
    while True:
        try:
            row, end = decoder.raw_decode(text, at)
        except RecursionError:
            refuse(where, f"an object of at most {DEEPEST} levels", text[at : at + 40])
        except ValueError as error:
            more = opened.read(max(_CHUNK, len(text))) if len(text) - at < _LONGEST else ""
            if not more:
                raise DataError(
                    f"{where}: the object that begins here is no JSON: {error}. Correct it, or get the file again."
                ) from error
            text, at = text[at:] + more, 0
        else:
            if is_too_deep(row):
                refuse(where, f"an object of at most {DEEPEST} levels", text[at : at + 40])
            return whole(row, text[at:end], where), at, end, text
