"""Entries of a log: model calls, whole rollouts, scores, traces, and entries without a usable call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from perturn.formats.json_stream import Record
from perturn.formats.logs.log_values import score_value
from perturn.io.plain_data import mismatch
from perturn.types import Action, Message

Lost = Literal["broken", "no_answer", "unsupported", "no_call"]
"""Reason why an entry gives no call. broken: it cannot be read. no_answer: it has no answer. unsupported: training
cannot use a part of it, such as an image. no_call: it is no call of a model, but for example the run of a tool."""


_LONGEST = 200
"""Maximum length of a value that is no score, in characters. A longer text is cut."""


@dataclass(frozen=True)
class Score:
    """A number that a person or program gave to a call, a trace or a session."""

    name: str
    value: float | None
    """The number; None if the log holds a value that is no score, such as the text `4 of 5`."""
    of: str
    """Id of the scored call, trace or session; empty if the record of the scored call holds the score."""
    text: str = ""
    """The value as text, if it is no score."""


def score_of(name: str, held: Any) -> Score:
    """Return the score of the record that holds it, also if the value is no score."""
    value = score_value(held)
    unreadable = "" if value is not None or held is None else str(held)[:_LONGEST]
    return Score(name, value, "", unreadable)


def no_score(found: Score) -> str:
    """Return the fault of a score whose value is None."""
    return f"{found.name}: {mismatch('a number, true, false, or thumbs such as up', found.text)}."


@dataclass(frozen=True)
class Call:
    """One request to a model and its answer, as a log holds them."""

    where: str
    """Location of the record, such as `log.jsonl:3`."""
    messages: tuple[Message, ...]
    """Messages of the request."""
    answer: Action
    ids: tuple[str, ...] = ()
    """Ids of the call: first of its span or run, then of its response. All choices of a response have the same ids."""
    choice: int = 0
    """Index of the answer among the choices of its response."""
    session: str | None = None
    """Id of the conversation, thread or session of the call."""
    trace: str | None = None
    """Id of the trace of the call."""
    time: float | None = None
    """Start time, in seconds since 1970."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the available tools, in the format of chat templates."""
    model: str = ""
    scores: tuple[Score, ...] = ()
    """Scores in the record of the call."""
    task: str | None = None
    """Task named by a field of the record. If None, the first user message is the task."""
    note: str = ""
    """Remark for the user on how the answer was read; empty if there is none."""


@dataclass(frozen=True)
class Trace:
    """A trace and its session."""

    id: str
    session: str


@dataclass(frozen=True)
class Step:
    """One answer of a policy, and all messages that the policy read before it."""

    messages: tuple[Message, ...]
    answer: Action
    tools: tuple[Mapping[str, Any], ...] = ()
    reward: float | None = None
    """Reward of the answer; None if the file has only rewards of whole rollouts."""
    trained: bool = True
    """Whether the trainer that wrote the file trains on the answer."""


@dataclass(frozen=True)
class Rollout:
    """A whole episode recorded by another trainer."""

    where: str
    """Location of the record, such as `results.jsonl:3`."""
    task: str | None
    """Task that groups the rollout with others. If None, the first user message is the task."""
    steps: tuple[Step, ...]
    """Answers in their order; empty if the rollout failed before its first answer."""
    scores: tuple[Score, ...] = ()
    """Named scores of the whole rollout."""
    truncated: bool = False
    """Whether a limit ended the rollout."""
    error: str | None = None
    """Error that ended the rollout; None if no error did."""
    policy: str = ""
    """Name of the policy, or the training step at which the rollout was played."""
    answer: str = ""
    """Gold answer of the task; empty if the file has none."""
    success: bool | None = None
    """Whether the record says that the rollout solved its task; None if it does not say."""
    unread: tuple[str, ...] = ()
    """Ignored keys of the record, without metadata."""


@dataclass(frozen=True)
class LostEntry:
    """An entry without a usable call."""

    where: str
    why: Lost
    reason: str = ""
    """Description of the fault; empty if the entry is not a call."""


Entry = Call | Rollout | Score | Trace | LostEntry


Decode = Callable[[Sequence[int], bool], str]
"""Decode token ids to text. The second argument says whether the text includes special tokens."""


@dataclass(frozen=True)
class Fields:
    """Names of a record's fields, given by the user, each as a path such as `metadata.user_id`.

    If a field is None, the usual fields of the format are read instead.
    """

    session: str | None = None
    task: str | None = None
    score: str | None = None
    decode: Decode | None = None
    """Decoder for records that hold token ids without text; None if the user named no tokenizer."""


Reader = Callable[[Iterator[Record], Fields], Iterator[Entry]]
"""Read the records of a log. Each record holds any number of entries."""


def of_another(found: Score, of: str | None, where: str) -> Score | LostEntry:
    """Return the score of a call, trace or session in another record, or the reason to leave the score out.

    Args:
        found: The score, from `score_of`.
        of: Id of the scored call, trace or session; None if the record names none.
        where: Location of the record.
    """
    if of is None or found.value is None:
        return LostEntry(where, "no_call", no_score(found) if found.text and of is not None else "")
    return replace(found, of=of)


@dataclass(frozen=True)
class LogFormat:
    """A format of logs."""

    says: str
    """Producers of the format, for messages to the user."""
    knows: Callable[[Mapping[str, Any]], bool]
    """Return whether a record has this format."""
    read: Reader
