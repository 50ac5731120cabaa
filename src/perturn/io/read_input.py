"""Outside input -> data: paths, text, JSON and YAML, each within limits, each mistake with its place.

A file, a server or a word of the command line may hold anything. Everything read here is bounded in size and depth, so
code that walks it needs no guard. Input beyond the bounds is one error of the caller's kind.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import IO, Any

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from yaml.constructor import ConstructorError

from perturn.errors import PerturnError
from perturn.io.plain_data import DEEPEST as DEEPEST
from perturn.io.plain_data import mended, mismatch, short
from perturn.io.user_paths import user_path as user_path
from perturn.io.yaml_scalars import keeping_text

LONGEST_FILE = 1 << 30
"""Bytes of a file that is read at once."""
LONGEST_LINE = 1 << 26
"""Bytes of a line."""
LONGEST_YAML = 1 << 18
"""Characters of a recipe, or of another text in YAML."""
MOST_NODES = 50_000
"""Values of a YAML text, with the content of its aliases counted each time."""
LONGEST_NUMBER = 100
"""Characters of a number in YAML."""

_EXPECTED = {
    "string_type": "text",
    "string_unicode": "valid Unicode",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a JSON object",
    "dataclass_type": "a {class_name} object",
    "greater_than_equal": "a number >= {ge}",
    "less_than_equal": "a number <= {le}",
}
"""Our words for the kinds of pydantic's errors; other errors name the expected value themselves."""

Refusal = type[PerturnError]
"""The error to raise."""


def read_text(
    file: Path,
    refusal: Refusal,
    remedy: str = "Correct the path or the file.",
    *,
    longest: int = LONGEST_FILE,
) -> str:
    """Return the text of a file in UTF-8, with or without a byte order mark.

    Raises:
        PerturnError: Of the kind `refusal`, if the file cannot be read, is not text, or is too long.
    """
    try:
        with file.open("rb") as opened:
            data = opened.read(longest + 1)
        if len(data) > longest:
            raise ValueError(f"it is longer than {longest} bytes")
        return data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise refusal(f"{short(str(file), 500)} cannot be read: {error}. {remedy}") from error


def read_lines(
    file: Path, refusal: Refusal, remedy: str = "Correct the path or the file."
) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers, each with its newline if it has one; a long file is not held.

    Raises:
        PerturnError: Of the kind `refusal`, if the file cannot be read, or a line is too long.
    """
    try:
        with file.open("rb") as opened:
            yield from lines_of(opened, str(file), refusal, remedy)
    except (OSError, ValueError) as error:
        raise refusal(f"{short(str(file), 500)} cannot be read: {error}. {remedy}") from error


def complete_lines(
    file: Path, refusal: Refusal, remedy: str = "Correct the path or the file."
) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file like `read_lines`, except a last line without its newline, which is being written."""
    return ((number, line) for number, line in read_lines(file, refusal, remedy) if line.endswith(b"\n"))


def lines_of(stream: IO[bytes], where: str, refusal: Refusal, remedy: str) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of an open file with their numbers, as in `read_lines`; errors of the stream are passed on."""
    number = 0
    while line := stream.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise refusal(f"{where}:{number}: the line is longer than {LONGEST_LINE} bytes. {remedy}")
        yield number, line


def parse_json(
    text: str | bytes, where: str, refusal: Refusal, remedy: str = "Correct it.", *, nan_as_null: bool = False
) -> Any:
    """Turn JSON text into data that is nested no deeper than `DEEPEST`.

    Raises:
        PerturnError: Of the kind `refusal`, if it is no JSON, or nested deeper.
    """
    try:
        hooks: Any = _NULLS if nan_as_null else {}
        data = json.loads(text, **hooks)
    except (ValueError, RecursionError) as error:
        reason = error if isinstance(error, ValueError) else "it is nested too deeply"
        got = text[:40] if isinstance(text, str) else text[:40].decode("utf-8", "backslashreplace")
        raise refusal(f"{where}: expected JSON, got {got!r} ({reason}). {remedy}") from error
    if is_too_deep(data):
        raise refusal(f"{where}: expected JSON of at most {DEEPEST} levels, got more. {remedy}")
    return data


def _finite(digits: str) -> float | None:
    """Return the number, or None where it is too large for one: 1e999 reads as infinity."""
    value = float(digits)
    return value if math.isfinite(value) else None


def _whole(digits: str) -> int | None:
    """Return the whole number, or None where no float is as large."""
    return None if _finite(digits) is None else int(digits)


_NULLS: Mapping[str, Callable[[str], Any]] = {
    "parse_constant": lambda _: None,
    "parse_float": _finite,
    "parse_int": _whole,
}
"""How numbers are read that no finite float holds: as None."""


def parse_object(
    text: str | bytes, where: str, refusal: Refusal, remedy: str = "Correct it."
) -> dict[str, Any]:
    """Return the object of a JSON text, with the rules of `parse_json`.

    Raises:
        PerturnError: Of the kind `refusal`, if it is anything else.
    """
    found: dict[str, Any] = check_shape(
        parse_json(text, where, refusal, remedy), dict, where, refusal, remedy
    )
    return found


def check_shape(data: Any, shape: Any, where: str, refusal: Refusal, remedy: str = "Correct it.") -> Any:
    """Return the data itself, unconverted, if it is of a type; keys that the type does not name may be there.

    Raises:
        PerturnError: Of the kind `refusal`, naming the first value that is not.
    """
    try:
        _adapter(shape).validate_python(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise refusal(f"{where}: {explain(first)}. {remedy}") from error
    return data


def explain(error: ErrorDetails) -> str:
    """Return the path of a value that pydantic rejected, the expected value, and the value found."""
    path = path_of(error["loc"])
    if error["type"] == "value_error":
        said = str(error["ctx"]["error"])  # of a check of ours, which may name a place within the value
        return f"{path}{said}".lstrip(".: ") if said.startswith((".", "[", ":")) else f"{path}: {said}"
    if error["type"] == "missing":
        return f"{path}: expected a value, got none"
    ours = _EXPECTED.get(error["type"])
    expected = ours.format(**error.get("ctx", {})) if ours else error["msg"].removeprefix("Input should be ")
    return f"{path}: {mismatch(expected, error['input'])}".removeprefix(": ")


def path_of(steps: Iterable[int | str]) -> str:
    """Return the place of a value in JSON data, such as `turns[3].action.token_ids`, cut where it is far too long."""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step:.80}" for step in steps)
    return short(mended(path.removeprefix(".")), 500)


@cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape)


def is_too_deep(data: Any) -> bool:
    """Return whether lists and mappings are nested deeper than `DEEPEST`."""
    level = [data]
    for _ in range(DEEPEST + 1):
        level = [
            item
            for each in level
            for item in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True


def parse_yaml(text: str, where: str, refusal: Refusal, *, keep_texts: bool = False) -> Any:
    """Turn YAML text into data of Python's plain types, within the limits above.

    Args:
        text: The text.
        where: What it is, for messages.
        refusal: The error to raise.
        keep_texts: Read scalars as YAML 1.2 does, and let numbers keep their texts; see `perturn.io.yaml_scalars`.

    Raises:
        PerturnError: Of the kind `refusal`, in one line with the place, if it is no YAML or beyond a limit.
    """
    if len(text) > LONGEST_YAML:
        raise refusal(f"{where} is longer than {LONGEST_YAML} characters. Correct it.")
    try:
        return yaml.load(text, Loader=_TextLoader if keep_texts else _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise refusal(f"{where} is not YAML: {_yaml_reason(error)}. Correct it.") from error


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with bounds, and with the place in every error."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._level = 0
        self._measures: dict[int, tuple[int, int]] = {}
        """Values and levels of what is composed, aliases put in full, by the node's identity."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, unless it is beyond a limit."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        self._level += 1
        if self._level > DEEPEST:
            raise ConstructorError(None, None, f"more than {DEEPEST} levels", mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._level -= 1
        if node is not None and not isinstance(event, yaml.AliasEvent):
            self._measures[id(node)] = self._measure(node, mark)
        return node

    def _measure(self, node: yaml.Node, mark: Any) -> tuple[int, int]:
        if isinstance(node, yaml.ScalarNode):
            if any("\ud800" <= each <= "\udfff" for each in node.value):
                raise ConstructorError(None, None, "half of a surrogate pair", mark)
            return 1, 1
        inner = [part for each in node.value for part in (each if isinstance(each, tuple) else (each,))]
        if not all(id(part) in self._measures for part in inner):
            raise ConstructorError(None, None, "an anchor that holds its own alias", mark)
        sizes, levels = zip(*(self._measures[id(part)] for part in inner), strict=True) if inner else ((), ())
        size, level = 1 + sum(sizes), 1 + max(levels, default=0)
        if size > MOST_NODES or level > DEEPEST:
            raise ConstructorError(
                None, None, f"more than {MOST_NODES} values or {DEEPEST} levels, with its aliases", mark
            )
        return size, level

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Make a value; PyYAML passes on errors of Python for a text that only looks like a number or a date."""
        try:
            if node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
                value = str(node.value)
                if len(value) > LONGEST_NUMBER:
                    raise ValueError(f"a number of more than {LONGEST_NUMBER} characters")
            return super().construct_object(node, deep)
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            kind = node.tag.rpartition(":")[2]
            raise ConstructorError(None, None, f"no {kind}: {error}", node.start_mark) from error


_TextLoader = keeping_text(_Loader)


def _yaml_reason(error: Exception) -> str:
    """Return fault and position, without the line itself, which may hold a secret."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return short(" ".join(str(error).split()), 300)
    said = ", ".join(
        part for part in (getattr(error, "context", None), getattr(error, "problem", None)) if part
    )
    return f"{short(' '.join(said.split()), 300)} in line {mark.line + 1}, column {mark.column + 1}"
