"""Read outside input, such as text, JSON and YAML, within limits of size and depth.

A file, a server or an argument of the command line may hold anything. Data from these functions is bounded in size and
depth, so later code needs no checks. Other input raises an error of the caller's class, which says where the fault is.
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
"""Largest file that is read as a whole, in bytes."""
LONGEST_LINE = 1 << 26
"""Longest line, in bytes."""
LONGEST_YAML = 1 << 18
"""Longest YAML text, such as a recipe, in characters."""
MOST_NODES = 50_000
"""Largest number of values in a YAML text. The content of an alias counts each time."""
LONGEST_NUMBER = 100
"""Longest number in YAML, in characters."""

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
"""Descriptions of the expected value for kinds of pydantic's errors. Other errors describe it themselves."""

Refusal = type[PerturnError]
"""Class of the error to raise."""


def read_text(
    file: Path,
    refusal: Refusal,
    remedy: str = "Correct the path or the file.",
    *,
    longest: int = LONGEST_FILE,
) -> str:
    """Return the text of a file in UTF-8, with or without a byte order mark.

    Raises:
        PerturnError: An error of class `refusal`, if the file cannot be read, is not text or is too long.
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
    """Yield the numbers, from 1, and the lines of a file, with their newlines. The file is not held in memory.

    Raises:
        PerturnError: An error of class `refusal`, if the file cannot be read or a line is too long.
    """
    try:
        with file.open("rb") as opened:
            yield from lines_of(opened, str(file), refusal, remedy)
    except (OSError, ValueError) as error:
        raise refusal(f"{short(str(file), 500)} cannot be read: {error}. {remedy}") from error


def complete_lines(
    file: Path, refusal: Refusal, remedy: str = "Correct the path or the file."
) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file like `read_lines`, except a last line without newline, which is still being written."""
    return ((number, line) for number, line in read_lines(file, refusal, remedy) if line.endswith(b"\n"))


def lines_of(stream: IO[bytes], where: str, refusal: Refusal, remedy: str) -> Iterator[tuple[int, bytes]]:
    """Yield the numbers and lines of an open file, like `read_lines`. Errors of the stream are not caught."""
    number = 0
    while line := stream.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise refusal(f"{where}:{number}: the line is longer than {LONGEST_LINE} bytes. {remedy}")
        yield number, line


def parse_json(
    text: str | bytes, where: str, refusal: Refusal, remedy: str = "Correct it.", *, nan_as_null: bool = False
) -> Any:
    """Parse JSON text into data of at most `DEEPEST` levels.

    Raises:
        PerturnError: An error of class `refusal`, if the text is not JSON or has more levels.
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
    """Return the number of a text; None if it is too large for a float, such as 1e999."""
    value = float(digits)
    return value if math.isfinite(value) else None


def _whole(digits: str) -> int | None:
    """Return the whole number of a text; None if it is too large for a float."""
    return None if _finite(digits) is None else int(digits)


_NULLS: Mapping[str, Callable[[str], Any]] = {
    "parse_constant": lambda _: None,
    "parse_float": _finite,
    "parse_int": _whole,
}
"""Hooks of `json.loads` that read numbers without a finite float as None."""


def parse_object(
    text: str | bytes, where: str, refusal: Refusal, remedy: str = "Correct it."
) -> dict[str, Any]:
    """Parse JSON text that holds an object, like `parse_json`.

    Raises:
        PerturnError: An error of class `refusal`, if the text is anything else.
    """
    found: dict[str, Any] = check_shape(
        parse_json(text, where, refusal, remedy), dict, where, refusal, remedy
    )
    return found


def check_shape(data: Any, shape: Any, where: str, refusal: Refusal, remedy: str = "Correct it.") -> Any:
    """Return the unconverted data if it matches a type. Keys that the type does not name are allowed.

    Raises:
        PerturnError: An error of class `refusal`, if the data does not match; names the first wrong value.
    """
    try:
        _adapter(shape).validate_python(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise refusal(f"{where}: {explain(first)}. {remedy}") from error
    return data


def explain(error: ErrorDetails) -> str:
    """Return a message about a value that pydantic rejected: its path, the expected value and the value found."""
    path = path_of(error["loc"])
    if error["type"] == "value_error":
        said = str(error["ctx"]["error"])  # from a check of Perturn, which may name a path within the value
        return f"{path}{said}".lstrip(".: ") if said.startswith((".", "[", ":")) else f"{path}: {said}"
    if error["type"] == "missing":
        return f"{path}: expected a value, got none"
    ours = _EXPECTED.get(error["type"])
    expected = ours.format(**error.get("ctx", {})) if ours else error["msg"].removeprefix("Input should be ")
    return f"{path}: {mismatch(expected, error['input'])}".removeprefix(": ")


def path_of(steps: Iterable[int | str]) -> str:
    """Return the path of a value in JSON data, such as `turns[3].action.token_ids`, cut at 500 characters."""
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
    """Parse YAML text into data of plain Python types, within the limits of this module.

    Args:
        text: The text.
        where: Description of the text, for messages.
        refusal: Class of the error to raise.
        keep_texts: Whether to read scalars like YAML 1.2, and to keep the texts of numbers; see
            `perturn.io.yaml_scalars`.

    Raises:
        PerturnError: An error of class `refusal`, if the text is not YAML or exceeds a limit; names the position.
    """
    if len(text) > LONGEST_YAML:
        raise refusal(f"{where} is longer than {LONGEST_YAML} characters. Correct it.")
    try:
        return yaml.load(text, Loader=_TextLoader if keep_texts else _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise refusal(f"{where} is not YAML: {_yaml_reason(error)}. Correct it.") from error


def has_comment(text: str) -> bool:
    """Return whether a valid YAML text has a comment."""
    end = 0
    for token in yaml.scan(text, Loader=_Loader) if "#" in text else ():
        if "#" in text[end : token.start_mark.index]:
            return True
        end = token.end_mark.index
    return False


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with limits, and with the position in every error."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._level = 0
        self._measures: dict[int, tuple[int, int]] = {}
        """Identity of a composed node -> its number of values, with aliases expanded, and its number of levels."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node; raise an error if it exceeds a limit."""
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

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping; raise an error if a key is repeated. Values of a merged mapping may be replaced."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set[tuple[str, str]]()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if (key.tag, key.value) in seen:
                said = f"key {short(key.value, 80)!r} is repeated"
                raise ConstructorError(None, None, said, key.start_mark)
            seen.add((key.tag, key.value))
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
        """Construct a value. PyYAML lets Python's errors through for texts that only look like a number or a date."""
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
    """Return the fault and its position, without the line itself, which may hold a secret."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return short(" ".join(str(error).split()), 300)
    said = ", ".join(
        part for part in (getattr(error, "context", None), getattr(error, "problem", None)) if part
    )
    return f"{short(' '.join(said.split()), 300)} in line {mark.line + 1}, column {mark.column + 1}"
