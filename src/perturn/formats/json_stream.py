"""Read a stream of JSON one value at a time, from JSON lines, an array, or objects that span lines."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import IO, Any, cast

from perturn.errors import DataError
from perturn.io.plain_data import DEEPEST, mismatch
from perturn.io.read_input import is_too_deep, lines_of, parse_object

_SOLID = re.compile(r"[^\s,]")
_CHUNK = 1 << 20
_LONGEST = 1 << 26
"""Maximum length of a value, in characters. A longer value is an error, since reading on would fill the memory."""
_REMEDY = "Correct it, or get the file again."


@dataclass(frozen=True)
class Record:
    """One object of a file, or an error if the object cannot be read."""

    number: int
    """Number in the source, from 1. JSON lines count lines; other sources count rows."""
    where: str
    """Location for messages, such as `rows.jsonl:3`."""
    label: str
    """Location within the source, such as `3`, or `3 (line 40)`."""
    value: dict[str, Any] | DataError
    text: str = ""
    """JSON text of the object; empty if the source is not JSON lines or JSON."""
    is_torn: bool = False
    """Whether the last line has no newline and cannot be read, as after an interrupted write."""


def read_json_lines(stream: IO[bytes], name: str) -> Generator[Record]:
    """Yield the objects of JSON lines. Skip blank lines, and continue after a line that cannot be read.

    Raises:
        DataError: If a line is too long.
    """
    for number, line in lines_of(stream, name, DataError, _REMEDY):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        value: dict[str, Any] | DataError
        text = ""
        try:
            text = line.decode()
            value = parse_object(text, "row", DataError)
        except UnicodeDecodeError as error:
            value = DataError(
                f"row: expected text in UTF-8, got a byte {line[error.start]:#x} at {error.start}. {_REMEDY}"
            )
        except DataError as error:
            value = error
        is_torn = isinstance(value, DataError) and not line.endswith(b"\n")
        yield Record(number, f"{name}:{number}", str(number), value, text, is_torn)


def read_json_values(stream: IO[bytes], name: str) -> Generator[Record]:
    """Yield the objects of a JSON array, or of a text of JSON objects one after the other.

    A value that is not an object gives a record with an error, and reading continues. Text that is no JSON gives a
    record with an error too. Reading then ends, because the beginning of the next value is unknown.
    """
    opened = io.TextIOWrapper(cast(Any, stream), "utf-8-sig", newline="")
    try:
        yield from _records(_Values(opened), name)
    finally:
        opened.detach()


def _records(values: _Values, name: str) -> Iterator[Record]:
    number = 0
    while True:
        line, text = values.line, ""
        row: dict[str, Any] | DataError
        try:
            found = values.next()
            if found is None:
                return
            value, line, text = found
            row = _checked(value)
        except _Broken as broken:
            row, line = DataError(f"row: {broken}"), values.line
        except UnicodeDecodeError as error:
            row, line = DataError(f"row: expected text in UTF-8: {error.reason}. {_REMEDY}"), values.line
        number += 1
        yield Record(number, f"{name}:{line}", f"{number} (line {line})", row, text)
        if not text:
            return


def _checked(value: Any) -> dict[str, Any] | DataError:
    """Return a value if it is an object, or an error."""
    if not isinstance(value, dict):
        return DataError(f"row: {mismatch('a JSON object', value)}. Correct it.")
    if is_too_deep(value):
        return DataError(f"row: expected an object of at most {DEEPEST} levels, got more. Correct it.")
    return value


class _Broken(Exception):
    """Raised where a text stops being JSON."""


class _Values:
    """Iterator over the values of a JSON text. It decodes one value at a time while it reads the text."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        self._text = text
        self._decoder = json.JSONDecoder()
        self._buffer, self._at = "", 0
        self._inside: bool | None = None
        """Whether the next value is inside an array; None before the first value is read."""
        self.line = 1
        """Line number of the next value."""

    def next(self) -> tuple[Any, int, str] | None:
        """Return the next value, its line and its text; None at the end."""
        while True:
            found = _SOLID.search(self._buffer, self._at)
            self._move(found.start() if found else len(self._buffer))
            if found is None:
                self._buffer, self._at = self._text.read(_CHUNK), 0
                if not self._buffer:
                    break
            elif self._buffer[self._at] == {None: "[", True: "]"}.get(self._inside):
                self._inside = self._buffer[self._at] == "["
                self._move(self._at + 1)
            else:
                self._inside = bool(self._inside)
                return self._value()
        if self._inside:
            raise _Broken(f"the array does not end: the file was cut short. {_REMEDY}")
        return None

    def _move(self, to: int) -> None:
        self.line += self._buffer.count("\n", self._at, to)
        self._at = to

    def _value(self) -> tuple[Any, int, str]:
        """Decode the value at the current position."""
        line = self.line
        if not self._inside and self._buffer[self._at] != "{":
            got = self._buffer[self._at : self._at + 40]
            raise _Broken(f"expected a JSON object, got {got!r}. Correct it.")
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._at)
            except RecursionError:
                raise _Broken(
                    f"expected an object of at most {DEEPEST} levels, got more. Correct it."
                ) from None
            except ValueError as error:
                if not self._read_more():
                    at = line + self._buffer.count("\n", self._at, getattr(error, "pos", self._at))
                    said = getattr(error, "msg", str(error))
                    raise _Broken(
                        f"the object that begins here is not valid JSON: {said} in line {at}. {_REMEDY}"
                    ) from error
            else:
                if end == len(self._buffer) and not isinstance(value, dict | list) and self._read_more():
                    continue  # a number may continue
                raw = self._buffer[self._at : end]
                self._move(end)
                return value, line, raw

    def _read_more(self) -> bool:
        """Read more of an incomplete value. Return False at the end of the text, or if the value is too long."""
        held = len(self._buffer) - self._at
        more = self._text.read(max(_CHUNK, held)) if held < _LONGEST else ""
        self._buffer, self._at = self._buffer[self._at :] + more, 0
        return bool(more)
