"""Plain data: what the whole way of a text carries, from a world or a policy to a tokenizer, a file and a page.

Output of a world or a policy is checked when it arrives, so that later code need not raise.
"""

from __future__ import annotations

import math
import reprlib

DEEPEST = 100
"""Levels of lists and objects within each other; readers and writers of JSON, and templates, fail at some hundreds."""
_BITS = 1024
"""Bits of a whole number: as large as a float can be. Python reads none of 5000 digits from JSON."""
_LONGEST = 2000
"""Characters that are kept of an exception's text."""

_Found = tuple[str, str, object]


def fault(value: object, where: str, *, halves: bool = False) -> str | None:
    """Return the first part of a value that is not plain data: Unicode, finite numbers, lists and objects of them.

    Args:
        value: The value.
        where: Its name.
        halves: Whether texts may hold half a surrogate pair, which JSON carries and a tokenizer does not.

    Returns: The place, the expected value, and the value found; None if the data is plain.
    """
    found = _find(value, halves, DEEPEST)
    if found is None:
        return None
    path, expected, culprit = found
    return f"{mended(where + path)}: {mismatch(expected, culprit)}"


def holds(value: object) -> bool:
    """Return whether a value says anything: false and 0 do; null and an empty text, list or object do not."""
    return bool(value) if isinstance(value, str | dict | list | tuple) else value is not None


def mismatch(expected: str, value: object) -> str:
    """Return an expectation, and a value that does not meet it, in words."""
    large = isinstance(value, int) and value.bit_length() > _BITS  # Python may refuse to write it
    got = "a larger one" if large else f"{reprlib.repr(value):.200}"
    return mended(f"expected {expected}, got {got} ({type(value).__name__})")


def _find(value: object, halves: bool, levels: int) -> _Found | None:
    """Return the path of the first value that is not plain, the expected kind, and the value."""
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        return None if halves or is_unicode(value) else ("", "valid Unicode", value)
    if isinstance(value, int):
        return None if value.bit_length() <= _BITS else ("", "a whole number below 2**1024", value)
    if isinstance(value, float):
        return None if math.isfinite(value) else ("", "a finite number", value)
    if not isinstance(value, dict | list | tuple):
        return "", "JSON data", value
    if not levels:
        return "", f"at most {DEEPEST} levels of lists and objects", value
    if isinstance(value, dict):
        return _find_in_object(value, halves, levels)
    for index, item in enumerate(value):
        if found := _find(item, halves, levels - 1):
            return f"[{index}]{found[0]}", *found[1:]
    return None


def _find_in_object(value: dict[object, object], halves: bool, levels: int) -> _Found | None:
    for key, item in value.items():
        if not isinstance(key, str):
            return f".{key!r:.60}", "a text key", key
        if not halves and not is_unicode(key):
            return "", "keys of valid Unicode", key
        if found := _find(item, halves, levels - 1):
            return f".{key:.60}{found[0]}", *found[1:]
    return None


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8: it holds no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def mended(text: str) -> str:
    """Return the text with U+FFFD for each lone half of a surrogate pair; two adjacent halves become a character."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def told(error: BaseException) -> str:
    """Return the text of an exception of others; to make it may raise another."""
    try:
        text = mended(str(error))
    except (Exception, SystemExit) as second:  # noqa: BLE001  the code of others
        text = f"(no text: {type(second).__name__})"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def short(text: str, length: int = 80) -> str:
    """Return the beginning of a text, with an ellipsis where some of it is left out."""
    return text if len(text) <= length else f"{text[:length]}…"
