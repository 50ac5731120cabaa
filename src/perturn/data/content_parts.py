"""Convert the content parts of chat messages to text."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from perturn.errors import DataError

_TEXTS = ("text", "input_text", "output_text")
"""Types of content parts that hold a text under `text`."""
_THOUGHTS = ("reasoning", "thinking")
"""Types of content parts that hold a thought under the name of the type."""
_PARTS = {
    *(*_TEXTS, *_THOUGHTS, "audio", "audio_url", "document", "file", "image", "image_url", "input_audio"),
    *("input_file", "input_image", "refusal", "video", "video_url"),
}
"""Types of content parts in public chat formats."""


class Said(NamedTuple):
    """The text and the thought of an assistant message."""

    text: str
    reasoning: str = ""


def flatten(content: Any, where: str) -> Any:
    """Return a list of text parts as one text, since many chat templates accept text alone; other content unchanged.

    Raises:
        DataError: If a part is not text.
    """
    if not isinstance(content, list):
        return content
    return "".join(_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def flatten_said(content: Any, where: str) -> Said | Any:
    """Return a list of an assistant message's parts as one text and one thought; other content unchanged.

    Raises:
        DataError: If a part is not a text, a refusal or a thought.
    """
    if not isinstance(content, list):
        return content
    texts, thoughts = [], []
    for index, part in enumerate(content):
        kind, at = part.get("type") if isinstance(part, Mapping) else None, f"{where}[{index}]"
        if kind in _THOUGHTS:
            thought = part.get(kind, part.get("text"))
            thoughts.append(flatten(thought, f"{at}.{kind}") if thought else "")
        elif kind == "refusal" and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
        else:
            texts.append(_text(part, at))
    return Said("".join(texts), "".join(map(str, thoughts)))


def tool_text(content: Any, where: str) -> str:
    """Return the result of a tool as text: texts and text parts unchanged, other data as JSON.

    Raises:
        DataError: If the result has a part that is not text, such as an image.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, list) and any(map(_is_part, content)):
        return str(flatten(content, where))
    return json.dumps(content, ensure_ascii=False)


def _is_part(item: Any) -> bool:
    kind = item.get("type") if isinstance(item, Mapping) else None
    return isinstance(kind, str) and kind in _PARTS and (kind not in _TEXTS or "text" in item)


def _text(part: Any, where: str) -> str:
    is_text = isinstance(part, Mapping) and part.get("type", "text") in _TEXTS
    if not is_text or not isinstance(part.get("text"), str):
        raise DataError(
            f"{where}: expected a text part (images and the like are not supported), got "
            f"{reprlib.repr(part)} ({type(part).__name__}). Drop the row."
        )
    for mark in ("train", "weight"):
        if part.get(mark) not in (None, True):  # 1 == True
            raise DataError(
                f"{where}.{mark}: a turn carries loss as a whole or not at all. Mark the message instead of the part."
            )
    return str(part["text"])
