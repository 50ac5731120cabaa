"""Convert the row formats of other trainers to TRL's columns, and name the recognised format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from perturn.errors import DataError
from perturn.io.plain_data import holds
from perturn.types import Message

AS_CHAT = " as text"
"""Part of the name of a format whose texts become messages of the model's chat template."""

SYSTEM = ("developer", "system")
"""Roles of system messages."""
_SIDES = ("chosen", "rejected")
_SHAREGPT = "from and value, as in ShareGPT"
_SPEAKERS = ("assistant", "gpt", "model", "function_call", "tool_call")
_SHORT = 40
"""Maximum length, in characters, of a prompt that an answer may repeat by chance, such as a greeting."""


def listed(value: Any, *, may_be_one: bool = False) -> Any:
    """Return a conversation as a list of messages. It may be JSON text, a list for each key, or a single message."""
    if isinstance(value, str):
        found = conversation_of(value)
        return value if found is None else found
    if not isinstance(value, Mapping) or not ("role" in value or "from" in value):
        return value
    if not all(isinstance(each, list) for each in value.values()):
        return [value] if may_be_one else value
    lengths = {len(each) for each in value.values()}
    if len(lengths) != 1:
        return value
    return [{key: each[at] for key, each in value.items()} for at in range(lengths.pop())]


def take_openai(read: dict[str, Any], others: dict[str, Any], unread: set[str]) -> str | None:
    """Move columns of OpenAI's preferences to TRL's columns.

    Args:
        read: Columns under TRL's names; receives the conversations.
        others: Columns of other trainers as plain data; the moved columns are removed.
        unread: Set that receives the ignored keys of `input`.

    Returns:
        Name of the format; None if the row is not OpenAI's preference.
    """
    posed = others.get("input")
    if not isinstance(posed, Mapping):
        return None
    del others["input"]
    read["prompt"] = posed.get("messages", [])
    if "tools" in posed:
        read["tools"] = posed["tools"]
    known = ("messages", "tools", "parallel_tool_calls")
    unread |= {f"column input.{key}" for key, value in posed.items() if key not in known and holds(value)}
    for ours, theirs in (("chosen", "preferred_output"), ("rejected", "non_preferred_output")):
        if theirs in others:
            read[ours] = others.pop(theirs)
    return "input, preferred_output and non_preferred_output, as OpenAI's preferences"


def translate(read: dict[str, Any], others: dict[str, Any], where: str) -> str:
    """Move the columns of other trainers' formats to TRL's columns, and convert their values.

    Returns:
        Description of the recognised format.

    Raises:
        DataError: If the row can be read in several ways, or asks for an unsupported kind of training.
    """
    if isinstance(functions := others.get("functions"), list) and functions and not read.get("tools"):
        others.pop("functions")
        read["tools"] = [{"type": "function", "function": each} for each in functions]
    name = next(
        (each for each in ("messages", "conversations", "conversation") if each in read or each in others), ""
    )
    shape = _messages(read, others, where) or _questions(read, others, where)
    messages = read.get("messages")
    ranked = _ranked(read, others, messages, name, where) if isinstance(messages, list) else None
    if ranked is None and (set(_SIDES) <= read.keys() or {"prompt", "completion"} <= read.keys()):
        shape = None if messages is not None else shape  # a format that takes precedence over messages
    shape = f"{name}{ranked}" if ranked else shape
    texts = _plain_texts(read, others, where)
    shape = shape or texts or _own(read)
    if isinstance(system := others.get("system"), str) and system:
        del others["system"]
        _put_system(read, system, where)
    return shape


def _own(read: Mapping[str, Any]) -> str:
    """Return the name of TRL's format that the columns have, with a note if the messages are ShareGPT's."""
    names = [each for each in ("prompt", *_SIDES) if each in read]
    if not set(_SIDES) <= read.keys():
        names = [each for each in ("prompt", "completion") if each in read]
        names = names if len(names) == 2 else ["messages"]
    said = " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]
    first = read.get(names[-1])
    is_sharegpt = isinstance(first, list) and first and isinstance(first[0], Mapping) and "from" in first[0]
    return f"{said} ({_SHAREGPT})" if is_sharegpt else said


def _messages(read: dict[str, Any], others: dict[str, Any], where: str) -> str | None:
    """Move a conversation under another name to `messages`. Return the format's name, or None."""
    if "messages" in read:
        return None
    if "conversations" in read:
        read["messages"] = read.pop("conversations")
        return f"conversations ({_SHAREGPT})" if _keys_of(read["messages"], "from") else "conversations"
    conversation_turns = listed(others.get("conversation"))
    if not any(_keys_of(conversation_turns, key) for key in ("human", "role", "from")):
        return None
    del others["conversation"]
    if _keys_of(conversation_turns, "human"):
        read["messages"] = exchanges(conversation_turns, f"{where}: conversation")
        return "conversation of human and assistant, as in ms-swift"
    read["messages"] = conversation_turns
    return "conversation"


def _keys_of(messages: Any, key: str) -> bool:
    """Return whether the first message of a list has a key."""
    return (
        isinstance(messages, list)
        and bool(messages)
        and isinstance(messages[0], Mapping)
        and key in messages[0]
    )


def _questions(read: dict[str, Any], others: dict[str, Any], where: str) -> str | None:
    """Convert the questions and answers of Alpaca and ms-swift to TRL's columns. Return the format's name, or None."""
    if read.keys() & {"messages", "completion"}:
        return None
    names = [name for name in ANSWERS if isinstance(others.get(name), str)]
    if "prompt" in read:
        if len(names) == 1 and not read.keys() & set(_SIDES):
            read["completion"] = others.pop(names[0])
            return f"prompt and {names[0]}{AS_CHAT}"
        return None
    sides = all(isinstance(read.get(side), str) for side in _SIDES)
    if not (names or sides):
        return None
    known = set(others)
    prompt = question_of(others, where, (*ASKS, "input") if sides else ASKS)
    if not prompt:
        return None
    used = [name for name in known if name not in others]
    if sides:
        read["prompt"] = prompt
        return f"{', '.join(sorted(used))}, chosen and rejected{AS_CHAT}"
    if len(names) > 1:
        raise DataError(f"{where}: has several answers, in {' and '.join(names)}. Keep one of them.")
    read["messages"] = [*prompt, *answered(others.pop(names[0]))]
    return f"{', '.join(sorted(used))} and {names[0]}{AS_CHAT}"


def _ranked(
    read: dict[str, Any], others: dict[str, Any], messages: list[Any], name: str, where: str
) -> str | None:
    """Make a pair of a conversation with two answers. Return the end of the format's name; None without two answers."""
    if others.get("rejected_messages"):
        read |= {"chosen": messages, "rejected": listed(others.pop("rejected_messages"))}
        del read["messages"]
        return " and rejected_messages, as in ms-swift"
    if isinstance(others.get("rejected_response"), str):
        read |= {"chosen": messages, "rejected": [*messages[:-1], *answered(others.pop("rejected_response"))]}
        del read["messages"]
        return " and rejected_response, as in ms-swift"
    if "prompt" in read or not all(isinstance(read.get(side), list | str) for side in _SIDES):
        return None
    chosen, rejected = (read[side] for side in _SIDES)
    texts = isinstance(chosen, str) and isinstance(rejected, str)
    if not texts and _begins_with(chosen, messages[:1]) and _begins_with(rejected, messages[:1]):
        return None  # each side is a whole conversation, so that `messages` adds nothing
    if not texts and not (_is_said(chosen) and _is_said(rejected)):
        raise DataError(
            f"{where}: has {name} beside chosen and rejected, which neither begin with its first message nor with an "
            f"answer. Rename {name} to prompt, or drop it."
        )
    read["prompt"] = read.pop("messages")
    return f", chosen and rejected{AS_CHAT if texts else ''}, as in LLaMA-Factory"


def _begins_with(side: Any, first: list[Any]) -> bool:
    return isinstance(side, list) and bool(first) and side[:1] == first


def _is_said(side: Any) -> bool:
    """Return whether a side begins with an assistant message."""
    first = side[0] if isinstance(side, list) and side and isinstance(side[0], Mapping) else {}
    return str(first.get("role", first.get("from"))).lower() in _SPEAKERS


def _plain_texts(read: dict[str, Any], others: dict[str, Any], where: str) -> str | None:
    """Convert the plain text of TRL's standard format to messages. Return the format's name, or None."""
    texts = {name for name in ("prompt", "completion", *_SIDES) if isinstance(read.get(name), str)}
    if set(_SIDES) <= read.keys():
        return _pair_of_texts(read, texts, where)
    if {"prompt", "completion"} <= read.keys():
        if "completion" in texts:
            _refuse_repeated(read, "completion", where)
            read["completion"] = answered(read["completion"])
        if "prompt" in texts:
            read["prompt"] = asked(read["prompt"], f"{where}: prompt")
        return f"prompt and completion{AS_CHAT}" if texts else None
    if isinstance(others.get("text"), str) and not {"messages", "completion"} & read.keys():
        read["messages"] = alone(others.pop("text"), f"{where}: text")
        return f"an answer without a question{AS_CHAT}" if len(read["messages"]) == 1 else "a transcript"
    return None


def _pair_of_texts(read: dict[str, Any], texts: set[str], where: str) -> str | None:
    """Convert a pair of plain texts to messages. Return the format's name, or None."""
    sides = texts & set(_SIDES)
    if len(sides) == 1:
        raise DataError(
            f"{where}: one of chosen and rejected is text, and the other is not. Write both in the same form."
        )
    if sides and not read.get("prompt"):
        prompt, read["chosen"], read["rejected"] = parted(read["chosen"], read["rejected"])
        read["prompt"] = asked(prompt, f"{where}: chosen")
        name = f"chosen and rejected{AS_CHAT}"
    elif sides:
        for side in _SIDES:
            _refuse_repeated(read, side, where)
        name = f"prompt, chosen and rejected{AS_CHAT}"
    else:
        if "prompt" in texts and _is_said(read["chosen"]) and _is_said(read["rejected"]):
            read["prompt"] = asked(read["prompt"], f"{where}: prompt")
            return f"prompt{AS_CHAT}, chosen and rejected"
        return None
    for side in sides:
        read[side] = answered(read[side])
    if isinstance(read["prompt"], str):
        read["prompt"] = asked(read["prompt"], f"{where}: prompt")
    return name


def _refuse_repeated(read: Mapping[str, Any], side: str, where: str) -> None:
    """Raise a DataError if an answer repeats the whole prompt, which a model would then read twice."""
    prompt = read.get("prompt")
    if isinstance(prompt, str) and len(prompt) > _SHORT and read[side].startswith(prompt):
        raise DataError(
            f"{where}: {side}: repeats the prompt. Drop the column prompt, or cut {side} after it."
        )


def _put_system(read: dict[str, Any], text: str, where: str) -> None:
    """Prepend the text of the column `system` to the messages as a system message."""
    starts = [name for name in ("prompt", "messages") if isinstance(read.get(name), list) and read[name]][:1]
    for name in starts or _SIDES:
        messages = read.get(name)
        if not isinstance(messages, list):
            continue
        first = messages[0] if messages and isinstance(messages[0], Mapping) else {}
        if str(first.get("role", first.get("from"))).strip().lower() not in SYSTEM:
            read[name] = [{"role": "system", "content": text}, *messages]
        elif first.get("content", first.get("value")) != text:
            raise DataError(f"{where}: system: {name} begins with another system text. Keep one of them.")


ASKS = ("instruction", "query", "question")
"""Columns of other trainers that hold the question of a row."""
ADDS = ("input", "context")
"""Columns whose text is appended to the question on a new line."""
ANSWERS = ("output", "response", "answer")
"""Columns that hold the answer of a row."""

_RENDERED = re.compile(r"<\|[a-z_]+\|>|<start_of_turn>|\[INST\]|<s>|<\uff5c")
"""Pattern of chat-template markup at the beginning of a rendered text."""
_HEADED = re.compile(
    r"<\|[a-z_]+\|>|<start_of_turn>|\[/?INST\]|^### ?(Human|Assistant|Instruction|Response|User):", re.M
)
"""Pattern of markup anywhere in a rendered conversation."""
_SPEAKER = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def asked(text: str, where: str) -> list[Message]:
    """Return a question as a user message; an empty text gives no message.

    Raises:
        DataError: If the text begins with the markup of a chat template.
    """
    if found := _RENDERED.match(text.lstrip()):
        _refuse(found[0], where)
    return [{"role": "user", "content": text}] if text else []


def answered(text: str) -> list[Message]:
    """Return an answer as an assistant message."""
    return [{"role": "assistant", "content": text}]


def conversation_of(text: str) -> list[Any] | None:
    """Return the messages of a text that is JSON or a transcript; None for any other text."""
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
    """Return whether a text is a transcript, with a line for each speaker, as in HH-RLHF."""
    return text.startswith(("\n\nHuman:", "Human:")) and "\n\nAssistant:" in text


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and ("role" in value or "from" in value)


def alone(text: str, where: str) -> list[Message]:
    """Return a text that carries loss as a whole, as an assistant message without a question.

    Raises:
        DataError: If the text is a rendered conversation, in which the prompt cannot be found.
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
    """Split two texts into their common beginning, which is the prompt, and the rest of each, as TRL does.

    A space at the end of the common beginning is moved to the beginning of both answers.
    """
    same = sum(1 for _ in takewhile(lambda each: each[0] == each[1], zip(chosen, rejected, strict=False)))
    if same and chosen[same - 1] == " ":
        same -= 1
    return chosen[:same], chosen[same:], rejected[same:]


def question_of(others: dict[str, Any], where: str, names: Sequence[str]) -> list[Message]:
    """Take the question of a row out of its columns. Return the exchanges of `history`, and then the question.

    Args:
        others: Columns of the row, from which the used columns are removed.
        where: Location of the row, for error messages.
        names: Columns that may hold the question; the first column with a text is used.

    Raises:
        DataError: If `history` is not a list of exchanges.
    """
    name = next((each for each in names if isinstance(others.get(each), str)), None)
    if name is None:
        return []
    parts = [others.pop(name), *(others.pop(each) for each in ADDS if isinstance(others.get(each), str))]
    text = "\n".join(part for part in parts if part)
    history = others.pop("history", None) or []
    if not isinstance(history, list):
        raise DataError(f"{where}: history: expected a list of exchanges, got {history!r:.60}. Correct it.")
    return [*exchanges(history, f"{where}: history"), *asked(text, f"{where}: {name}")]


def exchanges(pairs: list[Any], where: str) -> list[Message]:
    """Return the messages of some exchanges. Each is a list of question and answer, or an object of ms-swift.

    Raises:
        DataError: If an exchange is not two texts.
    """
    found: list[Message] = []
    for index, pair in enumerate(pairs):
        both = [pair.get("human"), pair.get("assistant")] if isinstance(pair, Mapping) else pair
        if not isinstance(both, list) or len(both) != 2 or not all(isinstance(each, str) for each in both):
            raise DataError(f"{where}[{index}]: expected a question and its answer, both text. Correct it.")
        found += [*asked(both[0], f"{where}[{index}]"), *answered(both[1])]
    return found
