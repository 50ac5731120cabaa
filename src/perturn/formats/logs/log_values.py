"""Read values in the records of logs: ids, times, scores, and data that may be JSON text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from perturn.data.records import LARGEST
from perturn.errors import DataError
from perturn.io.plain_data import mended, mismatch
from perturn.io.read_input import parse_json

_LONGEST = 1000
"""Maximum length of an id or a name, in characters. Longer names are cut."""
_DIGEST = 16
"""Length of the digest that a longer id ends with, in hexadecimal digits."""
_UP = (
    "up",
    "thumbs_up",
    "thumbs-up",
    "thumbsup",
    "👍",
    "+1",
    "positive",
    "good",
    "like",
    "liked",
    "yes",
    "true",
    "pass",
)
_DOWN = (
    *(
        "down",
        "thumbs_down",
        "thumbs-down",
        "thumbsdown",
        "👎",
        "-1",
        "negative",
        "bad",
        "dislike",
        "disliked",
    ),
    *("no", "false", "fail"),
)
_THUMBS = {**dict.fromkeys(_UP, 1.0), **dict.fromkeys(_DOWN, 0.0)}
"""Words of feedback, each with its score."""
_TEXTS = frozenset({"comment", "comments", "explanation", "reason", "reasoning", "note", "notes", "text"})
"""Keys of texts that accompany scores. A text such as `good` is no score there."""


def unpacked(value: Any, where: str) -> Any:
    """Parse a text that holds a JSON object or list. Return any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return parse_json(value, where, DataError)
        except DataError:
            return value  # a text that begins like JSON and is not
    return value


def mapping(value: Any) -> Mapping[str, Any]:
    """Return an object, or the object in a JSON text; an empty object for any other value."""
    found = unpacked(value, "")
    return found if isinstance(found, Mapping) else {}


def objects(value: Any) -> list[Mapping[str, Any]]:
    """Return the objects of a list, or of the JSON text of a list; an empty list for any other value."""
    found = unpacked(value, "")
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


def first(record: Mapping[str, Any], *names: str) -> Any:
    """Return the value of the first named field that is not empty; None if all are empty."""
    return next((record[name] for name in names if record.get(name) not in (None, "", [], {})), None)


def at_path(record: Mapping[str, Any], path: str) -> Any:
    """Return the field at a path such as `metadata.user_id`; None if the record has no such field.

    A key may itself contain dots, as the keys of spans do.
    """
    if path in record:
        return record[path]
    head, _, rest = path.partition(".")
    while rest:
        if (inner := mapping(record.get(head))) and (found := at_path(inner, rest)) is not None:
            return found
        more, _, rest = rest.partition(".")
        head = f"{head}.{more}"
    return None


def text_id(value: Any) -> str | None:
    """Return an id as text; None if the value is no id.

    A whole number may be a float, since columns of numbers with gaps hold floats. The end of a long text, such as a
    prompt that serves as an id, is replaced with a digest of the whole text, so that long ids stay distinct.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        return None
    text = mended(str(value))
    if len(text) <= _LONGEST:
        return text
    return text[: _LONGEST - _DIGEST] + hashlib.sha256(text.encode()).hexdigest()[:_DIGEST]


def ids_of(*values: Any) -> tuple[str, ...]:
    """Return the ids among some values, without duplicates."""
    return tuple(dict.fromkeys(found for value in values if (found := text_id(value))))


def seconds(value: Any) -> float | None:
    """Convert a date, or a number in s, ms, µs or ns, to seconds since 1970. Return None for any other value."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            try:
                read = datetime.fromisoformat(value)
            except ValueError:
                return None
            return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or (value := _number(value)) is None:
        return None
    for scale in (1e9, 1e6, 1e3):
        if abs(value) > 1e8 * scale:
            return value / scale
    return float(value)


def score_value(value: Any) -> float | None:
    """Convert a score to a number; None if it is none. True and thumbs up are 1, false and thumbs down are 0."""
    if not isinstance(value, str):
        return _number(value)
    word = value.strip().lower()
    if word in _THUMBS:
        return _THUMBS[word]
    try:
        return _number(float(word))
    except ValueError:
        return None


def _number(value: object) -> float | None:
    """Return a value as a number if it is finite and in the range of rewards; else None."""
    if isinstance(value, bool | int | float) and -LARGEST <= value <= LARGEST:
        return float(value)
    return None


def named_scores(record: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yield names and values of the scores in some fields: a value, an object of values, or a list of named values."""
    for name in names:
        held = unpacked(record.get(name), name)
        if (value := score_value(held)) is not None:
            yield name, value
        elif isinstance(held, Mapping):
            yield from _of_object(name, held)
        elif isinstance(held, list):
            for each in (one for one in held if isinstance(one, Mapping)):
                yield from _of_object(name, each)


def _of_object(name: str, held: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the scores of an object, which has a name and a value, or a value for each name."""
    if (value := score_value(first(held, "value", "score"))) is not None:
        yield text_id(first(held, "name", "key")) or name, value
        return
    for key, each in held.items():
        if key not in _TEXTS and (value := score_value(each)) is not None:
            yield mended(str(key)[:_LONGEST]), value


def bad(where: str, expected: str, value: object) -> DataError:
    """Return the error for a value that a format does not allow."""
    return DataError(f"{where}: {mismatch(expected, value)}.")
