"""Plain data: what the whole way of a text carries, from a world or a policy to a tokenizer, a file and a page.

What a world or a policy writes is checked here once, where it comes in, so that nothing later has to raise.
"""

from __future__ import annotations

import math

DEEPEST = 100
"""Levels of lists and objects within each other. Readers and writers of JSON, and templates, fail at several hundred."""
_BITS = 1024
"""Bits of a whole number: as large as a float can be. Python does not read one of 5000 digits from JSON."""
_LONGEST = 2000
"""Characters that are kept of what an exception says."""


def fault(value: object, *, halves: bool = False) -> str | None:
    """Why a value is no plain data: texts of valid Unicode, finite numbers, lists and objects of them; None if it is.

    Args:
        value: The value.
        halves: Whether texts may hold half a surrogate pair, which JSON carries and a tokenizer does not.
    """
    return _fault(value, halves, DEEPEST)


def _fault(value: object, halves: bool, levels: int) -> str | None:
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        return None if halves or is_unicode(value) else f"half a surrogate pair in the text {value!r:.60}"
    if isinstance(value, int):
        return None if value.bit_length() <= _BITS else f"a whole number of {value.bit_length()} bits"
    if isinstance(value, float):
        return None if math.isfinite(value) else f"the number {value}"
    if not isinstance(value, dict | list | tuple):
        return f"{value!r:.60} of type {type(value).__name__}"
    if not levels:
        return f"more than {DEEPEST} levels of lists and objects"
    if isinstance(value, dict):
        strange = next((key for key in value if not isinstance(key, str)), None)
        if strange is not None:
            return f"the key {strange!r:.60}, which is no text"
        value = [*value, *value.values()]
    return next((found for each in value if (found := _fault(each, halves, levels - 1))), None)


def is_unicode(text: str) -> bool:
    """Whether a text is one to UTF-8: no half of a surrogate pair stands alone in it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def mended(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair alone; two halves side by side are their character."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def told(error: BaseException) -> str:
    """What an exception of others says; it may be anything, even another exception."""
    try:
        text = mended(str(error))
    except Exception as second:  # noqa: BLE001  the code of others
        text = f"(no text: {type(second).__name__})"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
