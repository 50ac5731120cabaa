"""Rename the columns of other trainers to TRL's names, and find the columns that are ignored.

Arrow (`datasets`, Parquet) gives all objects of a column the same keys, and fills in None where an object lacks a key.
Such a None means nothing, whereas a None in a row of JSON may be intended.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from perturn.errors import DataError
from perturn.formats.row_shapes import ADDS, ANSWERS, ASKS, is_transcript, listed, take_openai, translate
from perturn.io.plain_data import fault, holds

_CONVERSATIONS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
LABELS = ("label", "kto_tag")
"""Columns whose boolean says whether the answer of a row is desirable."""
_COLUMNS = (*_CONVERSATIONS, "tools", *LABELS, "chat_template_kwargs")
_OTHERS = (
    *(
        "functions",
        "system",
        "conversation",
        "rejected_messages",
        "rejected_response",
        "text",
        "history",
        "kto_tag",
    ),
    *("preferred_output", "non_preferred_output", *ASKS, *ADDS, *ANSWERS),
)
"""Columns that only the formats of other trainers have."""
_MEDIA = ("audio", "audios", "image", "images", "objects", "video", "videos")
_WEIGHTS = (
    *("loss", "loss_mask", "loss_scale", "loss_weight", "sample_weight", "weight", "weights"),
    *("train", "trainable", "training"),
)
_METADATA = re.compile(
    r"(?:.*_)?(?:ids?|uuid|index|idx|hash|url|license|date|time|timestamp|created|created_at|version|name|names|source|"
    r"sources|dataset|split|subset|config|category|categories|topic|domain|task|type|kind|level|difficulty|language|"
    r"lang|tag|tags|model|models|generator|annotator|author|user|metadata|meta|extra|extra_info|info|comment|comments|"
    r"note|notes|margin|length|tokens|turns|channel|parallel_tool_calls)(?:_chosen|_rejected)?|"
    r"(?:.*_)?(?:scores?|ratings?|rewards?)_(?:chosen|rejected)|"
    r"(?:.*_)?(?:chosen|rejected)_(?:scores?|ratings?|rewards?)"
)
"""Pattern of the names of metadata columns, which are ignored without a warning. The score of a single conversation is
none of them: it may say that the conversation failed."""


class Columns(NamedTuple):
    """The supported columns of a row, under TRL's names."""

    read: dict[str, Any]
    shape: str
    """Description of the recognised format."""


def columns_of(row: Mapping[str, Any], where: str, filled: bool, unread: set[str]) -> Columns:
    """Return the supported columns of a row as plain data, under TRL's names.

    Args:
        row: The row.
        where: Location of the row, for error messages.
        filled: Whether the row comes from Arrow.
        unread: Set that receives the ignored columns, except empty columns and metadata.

    Raises:
        DataError: If a column holds no plain data, or if the row is ambiguous or asks for an unsupported kind of
            training.
    """
    given = {str(key): value for key, value in row.items() if value is not None}
    read = {name: plain_column(given[name], f"{where}: {name}") for name in _COLUMNS if name in given}
    others = {
        name: plain_column(given[name], f"{where}: {name}") for name in _OTHERS if _may_be(given.get(name))
    }
    unread |= {f"column {name}" for name in _OTHERS if name in given and name not in others}
    openai = take_openai(read, others, unread)
    unread |= {f"column {name}" for name in other_names(_rest(given, where))}
    if _is_filled([*read.values(), *others.values()], filled):
        read, others = _without_nulls(read), _without_nulls(others)
    written = {name: value for name in _CONVERSATIONS if isinstance(value := read.get(name), str)}
    read |= {
        name: listed(read[name], may_be_one=name not in ("messages", "conversations"))
        for name in _CONVERSATIONS
        if name in read
    }
    if "prompt" in written and read["prompt"][-1:] == [{"role": "assistant", "content": ""}]:
        read["prompt"].pop()  # the transcript ends with `Assistant:`, which asks for the answer
    shape = translate(read, others, where)
    if any(is_transcript(text) for text in written.values()):
        shape += ", transcripts of Human and Assistant"
    unread |= {f"column {name}" for name, value in others.items() if _holds(value)}
    form = _form_of(read)
    unread |= {f"column {name}" for name in _CONVERSATIONS if name not in form and _holds(read.get(name))}
    unread |= {f"column {name}" for name in LABELS if name in read and as_label(name, read[name]) is None}
    return Columns(read, openai or shape)


def as_label(name: str, value: Any) -> bool | None:
    """Return a label as a boolean; None for any other value. A number may be a class, except 1 and 0 in `kto_tag`."""
    kinds = (bool, int, float) if name == "kto_tag" else (bool,)
    return bool(value) if isinstance(value, kinds) and value in (0, 1) else None


def other_names(rest: Mapping[str, Any]) -> set[str]:
    """Return the names of ignored columns, except empty columns and metadata."""
    return {name for name, value in rest.items() if not _METADATA.fullmatch(name) and _holds(value)}


def without_filled(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of Arrow without the None that Arrow fills in for missing keys."""
    return _without_nulls(row) if _is_filled(list(row.values()), True) else dict(row)


def _may_be(value: Any) -> bool:
    """Return whether a value may belong to a format of another trainer. A number or a date cannot."""
    return isinstance(value, str | list | tuple | Mapping | bool) or hasattr(value, "tolist")


def plain_column(value: Any, where: str) -> Any:
    """Return the value of a column as plain data."""
    try:
        plain = _plain(value)
    except RecursionError:
        raise DataError(f"{where}: too many levels of lists and objects. Drop the row.") from None
    if found := fault(plain, where):
        raise DataError(f"{found}. Correct it, or drop the row.")
    return plain


def _rest(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the columns that are ignored. Raise a DataError for media and for weights of whole rows."""
    rest = {name: value for name, value in given.items() if name not in (*_COLUMNS, *_OTHERS)}
    for name in (each for each in _MEDIA if _holds(rest.get(each))):
        raise DataError(f"{where}: {name}: images, sound and the like are not supported. Drop the row.")
    for name in (each for each in _WEIGHTS if plain_column(rest.get(each, 1), f"{where}: {each}") != 1):
        raise DataError(
            f"{where}: {name}: a row has no weight of its own here. Mark messages with weight, 0 or 1, or give a "
            "WeightedTrajectory."
        )
    return {name: value for name, value in rest.items() if name not in (*_MEDIA, *_WEIGHTS)}


def _form_of(read: Mapping[str, Any]) -> set[str]:
    """Return the names of the columns that the recognised format reads."""
    if "chosen" in read and "rejected" in read:  # a prompt that is still text was not read
        return {"chosen", "rejected"} | ({"prompt"} if isinstance(read.get("prompt"), list) else set())
    return {"prompt", "completion"} if {"prompt", "completion"} <= read.keys() else {"messages"}


def _is_filled(columns: list[Any], from_arrow: bool) -> bool:
    """Return whether None means a missing key. It does if the messages of each column share their keys."""
    found = from_arrow
    for messages in columns:
        said = [each for each in messages if isinstance(each, Mapping)] if isinstance(messages, list) else []
        if len({frozenset(each) for each in said}) > 1:
            return False
        found |= any(value is None and key not in _OFTEN_NULL for each in said for key, value in each.items())
    return found


_OFTEN_NULL = {"annotations", "audio", "content", "function_call", "refusal"}
"""Keys that may hold None in messages of the OpenAI API."""


def _holds(value: Any) -> bool:
    """Return whether a value is not empty. The size of a numpy array decides."""
    return bool(value.size) if hasattr(value, "size") else holds(value)


def _plain(value: Any) -> Any:
    """Return a value as lists, dicts and scalars of Python."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


def _without_nulls(value: Any) -> Any:
    """Return plain data without the keys whose value is None."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
