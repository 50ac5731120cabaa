"""The prefix rule: find the recorded turn that an agent's next request continues, or why it continues none.

An agent program sends its whole conversation with each request. A request that extends an earlier request and its
answer, with the same tools and template variables, is the next turn of that sequence. Any other request opens a new
sequence in the same episode, for example after a compaction, in a sub-agent, or after an edit.

Each turn is trained in the context in which it was sampled. So two requests are equal exactly if the policy reads the
same tokens. Different forms of one text are equal. So are answers that differ in the white space around them, since the
policy reads its own sampled tokens and not the client's copy. An answer that comes back without its thought is a
different context.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, islice, takewhile
from typing import Any

from perturn.data.content_parts import Said, flatten, flatten_said, tool_text
from perturn.data.origins import without_ids
from perturn.episodes.tool_calls import as_text, understand
from perturn.io.call_arguments import ARGUMENTS, read_arguments
from perturn.types import Action, Message

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which clients return a thought."""
_INLINE = ("<think>", "</think>")


class Cause(StrEnum):
    """Reasons why a request continues no recorded turn."""

    SYSTEM = "system prompt changed"
    EDITED = "message edited"
    REMOVED = "message removed"
    REASONING = "reasoning stripped"
    ANSWER = "answer edited"
    TOOLS = "tools changed"
    VARIABLES = "template variables changed"
    OTHER = "another conversation"


@dataclass(frozen=True)
class Break:
    """The first difference between a request and the recorded conversation that shares its longest prefix."""

    cause: Cause
    turn: int
    """Index of the last turn of the recorded conversation."""
    message: int
    """Index of the first message of the request that differs; the number of messages if no message differs."""


@dataclass(frozen=True)
class Position:
    """Position of a request in an episode."""

    follows: int
    """Index of the turn that the request continues; -1 if it opens a sequence."""
    prompt: tuple[Message, ...]
    """Messages before the observation if the request opens a sequence; otherwise empty."""
    heard: tuple[Message, ...]
    """Observation of the request: its new user and tool messages."""
    broke: Break | None
    """Why the request opens a sequence although the episode has turns. None if it continues a turn, is the first
    request, or repeats an earlier request."""
    keys: tuple[bytes, ...] = field(repr=False, default=())
    """Digests of the conversation up to each message [messages]."""
    setting: tuple[str, str] = field(repr=False, default=("", ""))
    """Tools and template variables, each as text."""

    @property
    def end_key(self) -> tuple[bytes, tuple[str, str]] | None:
        """Key, valid across episodes, of the conversation up to its last answer; None if it has no answer."""
        answered = self.prompt and self.prompt[-1]["role"] == "assistant"
        return (self.keys[len(self.prompt) - 1], self.setting) if answered else None


@dataclass(frozen=True)
class _Known:
    """A recorded turn."""

    before: int
    texts: tuple[str, ...]
    """Texts, in the form of `comparable`, that the turn adds to the turn before it. The last text is the answer."""
    ends: list[tuple[bytes, tuple[str, str]]]
    """Keys of the conversation up to the answer, one for each form of the answer."""


class Sequences:
    """The conversations of an episode so far: each recorded turn, with the turn that it continues."""

    def __init__(self, *, reads_thoughts: bool = True) -> None:
        """Create an episode without turns.

        Args:
            reads_thoughts: Whether the policy reads the thoughts of earlier turns. If it does not, thoughts are ignored
                when requests are compared.
        """
        self._reads_thoughts = reads_thoughts
        self._turns: list[_Known] = []
        self._ends: dict[bytes, dict[tuple[str, str], list[int]]] = {}
        self._seen: dict[bytes, int] = {}  # digest of a conversation's prefix -> the newest turn that has it
        self._asked: dict[tuple[bytes, tuple[str, str]], list[int]] = {}  # opening request -> its turns
        self._continued: set[int] = set()

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def agents(self) -> int:
        """Estimated number of agents: the largest number of equal opening requests that later requests continued."""
        return (
            max((len(self._continued.intersection(turns)) for turns in self._asked.values()), default=0) or 1
        )

    def position(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        earlier: Position | None = None,
        same: int = 0,
    ) -> Position:
        """Return where a request continues the episode. Nothing is recorded.

        Args:
            messages: The whole conversation that an agent sent.
            tools: Schemas of the tools in the request.
            template_kwargs: Variables for the chat template.
            earlier: Position of another request with the same tools and variables.
            same: Number of messages at the start that both requests share. These messages are not compared again.

        Raises:
            DataError: If a message holds anything but text and calls.
        """
        known = earlier.keys[:same] if earlier else ()
        setting = (
            earlier.setting if earlier else (_text_of(list(tools)), _text_of(dict(template_kwargs or {})))
        )
        fresh = (self._compared(message) for message in messages[len(known) :])
        keys = (*known, *tuple(accumulate(fresh, _chained, initial=known[-1] if known else b""))[1:])
        said = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        begun = said[-1] + 1 if said else _head(messages)
        follows = self._turn_after(keys[said[-1]], setting) if said else None
        if follows is not None:
            return Position(follows, (), tuple(messages[begun:]), None, keys, setting)
        repeated = (_end(keys), setting) in self._asked
        broke = None
        if self._turns and not repeated:
            broke = self._break([self._compared(message) for message in messages], keys, setting)
        return Position(-1, tuple(messages[:begun]), tuple(messages[begun:]), broke, keys, setting)

    def add(self, position: Position, *answers: Message) -> int:
        """Record the turn of a request, and return the turn's index.

        Args:
            position: Position of the request, from `position`.
            answers: The answer as an assistant message, in each form in which a client may return it.
        """
        index = len(self._turns)
        texts = tuple(self._compared(message) for message in position.heard)
        if position.follows < 0:
            texts = (*(self._compared(message) for message in position.prompt), *texts)
            self._asked.setdefault((_end(position.keys), position.setting), []).append(index)
        else:
            self._continued.add(position.follows)
        compared = [self._compared(answer) for answer in answers]
        ends = [_chained(_end(position.keys), text) for text in dict.fromkeys(compared)]
        known = _Known(position.follows, (*texts, compared[0]), [(end, position.setting) for end in ends])
        self._turns.append(known)
        self._seen |= dict.fromkeys((*position.keys, *ends), index)
        for end in ends:
            self._ends.setdefault(end, {}).setdefault(position.setting, []).append(index)
        return index

    def end_keys(self, index: int) -> list[tuple[bytes, tuple[str, str]]]:
        """Return the keys of the conversation up to a turn's answer; see `Position.end_key`."""
        return self._turns[index].ends

    def is_continued(self, end: tuple[bytes, tuple[str, str]]) -> bool:
        """Return whether every turn that ends a conversation is continued by another; see `Position.end_key`."""
        return self._continued.issuperset(self._ends.get(end[0], {}).get(end[1], ()))

    def _turn_after(self, key: bytes, setting: tuple[str, str]) -> int | None:
        """Return the newest turn that ends a conversation, preferably a turn that no other turn continues."""
        found = self._ends.get(key, {}).get(setting, [])
        free = [turn for turn in found if turn not in self._continued]
        return max(free or found, default=None)

    def _break(self, texts: Sequence[str], keys: Sequence[bytes], setting: tuple[str, str]) -> Break:
        """Return the first difference between a request and the recorded turns."""
        alike = next((index for index, key in enumerate(keys) if key not in self._seen), len(keys))
        turn = self._seen[keys[alike - 1]] if alike else len(self._turns) - 1
        settings = [known for key in keys if key in self._ends for known in self._ends[key]]
        if settings and setting not in settings:
            other_tools = all(known[0] != setting[0] for known in settings)
            return Break(Cause.TOOLS if other_tools else Cause.VARIABLES, turn, alike)
        return Break(why_broke(self._conversation(turn), texts, alike), turn, alike)

    def _conversation(self, turn: int) -> list[str]:
        """Return the texts of all messages up to a turn's answer."""
        parts = []
        while turn >= 0:
            parts.append(self._turns[turn].texts)
            turn = self._turns[turn].before
        return [text for part in reversed(parts) for text in part]

    def _compared(self, message: Message) -> str:
        return comparable(message, reads_thoughts=self._reads_thoughts)


def why_broke(known: Sequence[str], sent: Sequence[str], alike: int) -> Cause:
    """Return why a conversation does not continue a recorded conversation.

    Args:
        known: Messages of the recorded conversation, in the form of `comparable`.
        sent: Messages of the request, in the form of `comparable`.
        alike: Number of messages that both conversations share at the start.
    """
    if alike == len(sent):
        return Cause.REMOVED  # it stops at an earlier message
    if alike == len(known):
        return Cause.EDITED  # the agent added an answer of its own after the recorded one
    was, came = json.loads(known[alike]), json.loads(sent[alike])
    rest, later = known[alike + 1 :], sent[alike + 1 :]
    if was[0] == came[0] == "system":
        return Cause.SYSTEM if rest and rest[:1] == later[:1] else Cause.OTHER
    began_alike = any(json.loads(text)[0] != "system" for text in sent[:alike])
    if not began_alike and set(rest).isdisjoint(sent[alike:]):
        return Cause.OTHER
    if sent[alike] in rest or len(sent) < len(known):
        return Cause.REMOVED
    if was[0] == came[0] == "assistant":
        return Cause.REASONING if _without_thought(was) == _without_thought(came) else Cause.ANSWER
    return Cause.EDITED


def comparable(message: Message, *, reads_thoughts: bool = True) -> str:
    """Return a text that is equal for two messages if and only if a policy reads both as the same tokens.

    Args:
        message: A chat message. Its content is text or a list of text parts; arguments of calls are an object or JSON
            text.
        reads_thoughts: Whether to compare the thought of an assistant message.

    Raises:
        DataError: If its content is not text.
    """
    role, content = message["role"], message.get("content")
    if role == "assistant":
        said = flatten_said(content, "content")
        said = said if isinstance(said, Said) else Said(said or "")
        thoughts = (str(message[key]) for key in _THOUGHTS if message.get(key))
        thought = next(thoughts, said.reasoning).strip() if reads_thoughts else ""
        calls = [_call(call) for call in message.get("tool_calls") or ()]
        return _text_of([role, str(said.text).strip(), thought, calls])
    if role == "tool":
        return _text_of([role, tool_text(content, "content")])
    role = "system" if role == "developer" else role
    return _text_of([role, flatten("" if content is None else content, "content"), message.get("name") or ""])


def in_call_order(messages: Iterable[Message]) -> list[Message]:
    """Return messages with tool results in the order of their calls, with the names of tools and without ids of calls.

    Episodes are recorded in this form, since ids are chosen by the client and a policy does not read them. If a call
    of an answer cannot be read, the calls of the answer become text.
    """
    found: list[Message] = []
    calls: list[dict[str, Any]] = []  # of the last answer
    positions: Iterator[int] = iter(())  # index of the call of each result
    given = list(messages)
    for at, message in enumerate(given):
        plain = {key: value for key, value in message.items() if key != "tool_call_id"}
        if message["role"] == "assistant":
            positions = _positions(message, islice(given, at + 1, None))
            calls = without_ids(message.get("tool_calls") or ())
            action = Action(str(plain.get("content") or ""), tool_calls=tuple(calls))
            if is_broken(action):
                plain = {key: value for key, value in plain.items() if key != "tool_calls"}
                found.append({**plain, "content": as_text(action).text})
            else:
                found.append(plain | ({"tool_calls": calls} if calls else {}))
        elif message["role"] == "tool":
            position = next(positions, len(calls))
            named = {}
            if position < len(calls):
                named["name"] = str(calls[position].get("function", calls[position]).get("name", ""))
            found.append({"role": "tool", **named, **plain, "at": position})
        else:
            found.append(plain)
    return _sorted_results(found)


def _positions(answer: Message, later: Iterable[Message]) -> Iterator[int]:
    """Yield the index of the call of each tool result up to the next answer.

    A result whose id names a call belongs to this call. Any other result belongs to the first call that no result
    names, or has the number of calls as its index if there is none.
    """
    block = takewhile(lambda each: each["role"] != "assistant", later)
    meant = [str(each.get("tool_call_id") or "") for each in block if each["role"] == "tool"]
    ids = [str(call.get("id") or "") for call in answer.get("tool_calls") or ()]
    wanted = Counter(filter(None, meant))
    named: dict[str, list[int]] = {}
    free: list[int] = []
    for index, known in enumerate(ids):
        is_named = len(named.get(known, ())) < wanted[known]
        (named.setdefault(known, []) if is_named else free).append(index)
    for known in meant:
        if known not in named:
            yield free.pop(0) if free else len(ids)
        else:
            yield named[known].pop(0) if len(named[known]) > 1 else named[known][0]


def as_recorded(answer: Action) -> Action:
    """Return an answer in the form of `in_call_order`."""
    if is_broken(answer):
        return as_text(answer)
    return replace(answer, tool_calls=tuple(without_ids(answer.tool_calls)))


def is_broken(answer: Action) -> bool:
    """Return whether a call of an answer cannot be read, for example because its arguments are no JSON object."""
    return bool(answer.tool_calls) and understand(answer)[1] is None


def _sorted_results(messages: Sequence[Message]) -> list[Message]:
    """Return messages with consecutive tool results sorted by the position of their calls."""
    done: list[Message] = []
    run: list[Message] = []
    for message in [*messages, {"role": ""}]:
        if message["role"] == "tool":
            run.append(message)
            continue
        done += sorted(run, key=lambda each: int(each["at"]))
        run = []
        done.append(message)
    return [{key: value for key, value in each.items() if key != "at"} for each in done[:-1]]


def _head(messages: Sequence[Message]) -> int:
    """Return the number of system messages at the start of a conversation."""
    roles = [message["role"] in ("system", "developer") for message in messages]
    return roles.index(False) if False in roles else len(roles)


def _call(call: Mapping[str, Any]) -> list[Any]:
    """Return the name and the arguments of a call."""
    function = call.get("function", call)
    given: Any = next((function[key] for key in ARGUMENTS if function.get(key) is not None), {})
    arguments = read_arguments(given)
    return [function.get("name"), given if arguments is None else arguments]


def _without_thought(compared: Sequence[Any]) -> tuple[str, Any]:
    """Return the text and calls of an assistant message in the form of `comparable`, without any thought."""
    text = str(compared[1])
    opened, closed = _INLINE
    if closed in text:
        text = text[: text.find(opened)] * (opened in text) + text.partition(closed)[2]
    return text.strip(), compared[3]


_text_of = json.JSONEncoder(sort_keys=True, default=str).encode
"""Function from a value to JSON text, which is equal for equal values."""


def _end(keys: Sequence[bytes]) -> bytes:
    """Return the digest of a whole conversation, which may be empty."""
    return keys[-1] if keys else b""


def _chained(before: bytes, text: str) -> bytes:
    """Return the digest of a conversation extended by one message."""
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()
