"""The content of a message, which may come as a list of parts."""

from __future__ import annotations

import reprlib
from typing import Any

from perturn.errors import DataError


def flatten(content: Any, where: str) -> Any:
    """Parts of text as one text; any other content as it is, since many chat templates take text alone.

    Raises:
        DataError: If a part is no text.
    """
    if not isinstance(content, list):
        return content
    for index, part in enumerate(content):
        is_text = isinstance(part, dict) and part.get("type", "text") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise DataError(
                f"{where}[{index}]: expected a text part (images and the like are not supported), got "
                f"{reprlib.repr(part)} ({type(part).__name__}). Drop the row."
            )
    return "".join(part["text"] for part in content)
