"""Rows of plain text -> messages: TRL's standard format, Alpaca's and ms-swift's columns, and transcripts.

A text that answers becomes an assistant message, and a text that asks a user message. So they are read in the chat
template of the model, where TRL reads them without one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import takewhile
from typing import Any, NoReturn

from perturn.errors import DataError
from perturn.types import Message

ASKS = ("instruction", "query", "question")
"""Columns of other trainers whose text is the question of a row."""
ADDS = ("input", "context")
"""Columns whose text belongs to the question, in a line after it."""
ANSWERS = ("output", "response", "answer")
"""Columns whose text is the answer of a row."""

_RENDERED = re.compile(r"<\|[a-z_]+\|>|<start_of_turn>|\[INST\]|<s>|<\uff5c")
"""Marks of a text that a chat template has made, where it begins with one."""
_HEADED = re.compile(
    r"<\|[a-z_]+\|>|<start_of_turn>|\[/?INST\]|^### ?(Human|Assistant|Instruction|Response|User):", re.M
)
"""Marks of a text that holds a conversation."""
_SPEAKER = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def asked(text: str, where: str) -> list[Message]:
    """Return a question as messages; none of an empty text.

    Raises:
        DataError: If it begins as a chat template writes a conversation.
    """
    if found := _RENDERED.match(text.lstrip()):
        _refuse(found[0], where)
    return [{"role": "user", "content": text}] if text else []


def answered(text: str) -> list[Message]:
    """Return an answer as messages."""
    return [{"role": "assistant", "content": text}]


def conversation_of(text: str) -> list[Any] | None:
    """Return the messages that a text holds as JSON or as a transcript; None if it is a text of its own."""
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if isinstance(found, list) and found and all(map(_is_message, found)):
            return found
    if not is_transcript(text):
        return None
    _, *parts = _SPEAKER.split(text if text.startswith("\n") else f"\n\n{text}")
    speakers = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": _ROLES[name], "content": said.strip()} for name, said in speakers]


def is_transcript(text: str) -> bool:
    """Whether a text is a conversation with a line for each speaker, as in HH-RLHF."""
    return text.startswith(("\n\nHuman:", "Human:")) and "\n\nAssistant:" in text


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and ("role" in value or "from" in value)


def alone(text: str, where: str) -> list[Message]:
    """Return a text that carries loss as a whole, as an answer to nothing.

    Raises:
        DataError: If it is a conversation that a chat template has made: what is prompt in it cannot be told.
    """
    if (conversation := conversation_of(text)) is not None:
        return conversation
    if found := _HEADED.search(text):
        _refuse(found[0], where)
    return answered(text)


def _refuse(mark: str, where: str) -> NoReturn:
    raise DataError(
        f"{where}: expected plain text, got a conversation that a template has written out ({mark!r} is in it), of "
        "which nobody can tell what carries loss. Give the conversation as messages."
    )


def parted(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Return the prompt that two texts begin with, and the rest of each, as TRL parts them.

    The prompt is all that both begin with, without a space at its end, which then begins both answers.
    """
    same = sum(1 for _ in takewhile(lambda each: each[0] == each[1], zip(chosen, rejected, strict=False)))
    if same and chosen[same - 1] == " ":
        same -= 1
    return chosen[:same], chosen[same:], rejected[same:]


def question_of(others: dict[str, Any], where: str) -> list[Message]:
    """Take the question of a row from its columns, with the exchanges of `history` before it; none if there is none.

    Raises:
        DataError: If `history` is no list of exchanges.
    """
    name = next((each for each in ASKS if isinstance(others.get(each), str)), None)
    if name is None:
        return []
    parts = [others.pop(name), *(others.pop(each) for each in ADDS if isinstance(others.get(each), str))]
    text = "\n".join(part for part in parts if part)
    history = others.pop("history", None) or []
    if not isinstance(history, list):
        raise DataError(f"{where}: history: expected a list of exchanges, got {history!r:.60}. Correct it.")
    return [*exchanges(history, f"{where}: history"), *asked(text, f"{where}: {name}")]


def exchanges(pairs: list[Any], where: str) -> list[Message]:
    """Return the messages of exchanges, each a question with its answer: a list of both, or ms-swift's object.

    Raises:
        DataError: If one is no exchange of texts.
    """
    found: list[Message] = []
    for index, pair in enumerate(pairs):
        both = [pair.get("human"), pair.get("assistant")] if isinstance(pair, Mapping) else pair
        if not isinstance(both, list) or len(both) != 2 or not all(isinstance(each, str) for each in both):
            raise DataError(f"{where}[{index}]: expected a question and its answer, both text. Correct it.")
        found += [*asked(both[0], f"{where}[{index}]"), *answered(both[1])]
    return found
