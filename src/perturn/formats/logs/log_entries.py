"""Entries of a log: calls of a model, whole rollouts, scores, traces, and entries that cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from perturn.formats.json_stream import Record
from perturn.types import Action, Message

Lost = Literal["broken", "no_answer", "unsupported", "no_call"]
"""Why an entry gives no call: it cannot be read; the call has no answer; it holds something that training cannot use,
such as an image; or it is not a call of a model, such as the run of a tool."""


@dataclass(frozen=True)
class Score:
    """A number that somebody gave a call, a trace or a session."""

    name: str
    value: float
    of: str
    """Id of the call, trace or session; empty: the call that holds it."""


@dataclass(frozen=True)
class Call:
    """One request to a model and its answer, as in a log."""

    where: str
    """Place of its record, such as `log.jsonl:3`."""
    messages: tuple[Message, ...]
    """Messages of the request."""
    answer: Action
    ids: tuple[str, ...] = ()
    """Ids of the call: of its span or run first, then of its response."""
    session: str | None = None
    """Id of the conversation, thread or session that it belongs to."""
    trace: str | None = None
    """Id of the trace that it belongs to."""
    time: float | None = None
    """Start, in seconds since 1970."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the tools that the model could call, in the form of chat templates."""
    model: str = ""
    scores: tuple[Score, ...] = ()
    """Scores that its own record holds."""
    task: str | None = None
    """Task that a field of the record names; None: the first user message is the task."""


@dataclass(frozen=True)
class Trace:
    """A trace, with the session that it belongs to."""

    id: str
    session: str


@dataclass(frozen=True)
class Step:
    """One answer of a policy, with all that the policy read before it."""

    messages: tuple[Message, ...]
    answer: Action
    tools: tuple[Mapping[str, Any], ...] = ()
    reward: float | None = None
    """Reward of this answer; None: the file gives rewards to whole rollouts alone."""
    trained: bool = True
    """Whether the trainer that wrote the file trains on the answer."""


@dataclass(frozen=True)
class Rollout:
    """A whole episode, as another trainer recorded it."""

    where: str
    """Place of its record, such as `results.jsonl:3`."""
    task: str | None
    """Task of its group; None: its first user message is the task."""
    steps: tuple[Step, ...]
    """Answers in their order; none where the rollout failed before the first."""
    scores: tuple[Score, ...] = ()
    """Scores of the whole rollout, by name."""
    truncated: bool = False
    """Whether a limit ended it."""
    error: str | None = None
    """The error that ended it; None: there was none."""
    policy: str = ""
    """Name of the policy, or the training step at which it was written."""
    answer: str = ""
    """Gold answer of the task, if the file has one."""


@dataclass(frozen=True)
class LostEntry:
    """An entry that gives no call."""

    where: str
    why: Lost
    reason: str = ""
    """The fault in words; empty if the entry is not a call."""


Entry = Call | Rollout | Score | Trace | LostEntry


Decode = Callable[[Sequence[int], bool], str]
"""Returns the text of token ids, with special tokens where the second argument is true."""


@dataclass(frozen=True)
class Fields:
    """Fields of a record that a user names, each a path such as `metadata.user_id`; None: the usual ones."""

    session: str | None = None
    task: str | None = None
    score: str | None = None
    decode: Decode | None = None
    """Text of token ids, for records without texts; None: no tokenizer was named."""


Reader = Callable[[Iterator[Record], Fields], Iterator[Entry]]
"""Reads the records of a log; each holds any number of entries."""


@dataclass(frozen=True)
class LogFormat:
    """A format of logs."""

    says: str
    """Producers of such logs, in words."""
    knows: Callable[[Mapping[str, Any]], bool]
    """Whether a record is of this format."""
    read: Reader
