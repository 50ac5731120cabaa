"""Split the text of an answer into words and tool calls, for any known format of calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from perturn.episodes.calls import CALL_FORMATS
from perturn.episodes.calls.call import CallFormat, ToolCall, Tools
from perturn.errors import DataError
from perturn.io.call_arguments import skip_space

_THOUGHTS = {"<think>": "</think>", "[THINK]": "[/THINK]", "<|channel>thought": "<channel|>"}
"""Marks that open a thought, each with the mark that closes it."""
THOUGHT_MARKS = frozenset([*_THOUGHTS, *_THOUGHTS.values(), "<|channel>"])
"""Tokens that open or close a thought."""
_LEADING = re.compile(
    rf"\A(?:\s*(?:{'|'.join(f'{re.escape(each)}.*?{re.escape(end)}' for each, end in _THOUGHTS.items())}))+",
    re.DOTALL,
)
"""Pattern of the closed thoughts with which a text begins."""
_CLOSED = "</think>"
"""Mark that closes a thought. The prompt may have opened this thought."""
_BARE = re.compile(
    r'^[ \t]*(?:\{|\[\s*\{)\s*"(?:name|id|type|function|arguments|parameters|args)"', re.MULTILINE
)
"""Beginning of a line where calls without marks may begin."""
_BARE_AT_ONCE = re.compile(r"\s*(?=[\[{])")
"""Position at the start of a text, or after a thought, where calls without marks may begin."""
_MENTION = re.compile(r"<tool_call>(?=[ \t]+[^\s{\[<]|[`'\".,;:!?)]|\s*<tool_call>)")
"""An opening tag that begins no call: a word in a sentence, or one of two tags in a row. If the turn has a call
elsewhere, it stays valid."""


@dataclass(frozen=True)
class _Events:
    """Regular expression that finds the beginnings of thoughts and calls, and marks without a call."""

    pattern: re.Pattern[str]
    formats: Mapping[str, CallFormat]
    """Formats by the names of their groups in the pattern."""
    bare: tuple[CallFormat, ...]
    """Formats whose calls may have no marks."""


@cache
def _events() -> _Events:
    formats = {f"f{number}": CALL_FORMATS[name] for number, name in enumerate(CALL_FORMATS)}
    opens = [f"(?P<{name}>{each.opens})" for name, each in formats.items()]
    marks = {mark for each in formats.values() for mark in each.marks}
    thoughts = "|".join(map(re.escape, [*_THOUGHTS, _CLOSED]))
    stray = "|".join(map(re.escape, sorted(marks)))
    pattern = re.compile("|".join([f"(?P<thought>{thoughts})", *opens, f"(?P<stray>{stray})"]), re.MULTILINE)
    return _Events(pattern, formats, tuple(each for each in formats.values() if each.bare))


@cache
def kept_tokens() -> frozenset[str]:
    """Return the tokens that are parts of calls or mark thoughts. Decoding keeps them, even if they are special."""
    calls = (text for each in CALL_FORMATS.values() for text in (*each.marks, *each.tokens))
    return THOUGHT_MARKS.union(calls)


@cache
def thought_tokens() -> frozenset[str]:
    """Return the tokens that mark thoughts, with all tokens of formats that write thoughts as messages."""
    written = (text for each in CALL_FORMATS.values() if each.thinks for text in (*each.marks, *each.tokens))
    return THOUGHT_MARKS.union(written)


@dataclass
class Reading:
    """State and result of splitting a text into words and calls."""

    text: str
    tools: Tools
    reads_calls: bool = True
    """Whether calls are read. Otherwise only thoughts are read, and calls are words."""
    calls: list[ToolCall] = field(default_factory=list)
    malformed: bool = False
    """Whether the text has a call that cannot be executed as it is written."""
    _at: int = 0
    _said: list[list[str]] = field(default_factory=lambda: [[]])  # words before, between and after calls
    _may_close: bool = True  # whether the prompt may have opened a thought
    _tried: bool = False  # whether calls without marks have been tried
    _mentioned: bool = False  # whether a mark is a word of a sentence
    _never_closed: set[str] = field(default_factory=set)  # thoughts that no later mark closes

    @property
    def said(self) -> str:
        """Text without the calls, with thoughts between `<think>` and `</think>`."""
        return "\n".join(filter(None, ("".join(words).strip() for words in self._said)))

    def run(self) -> Reading:
        """Read the whole text, in time proportional to its length."""
        events = _events()
        while True:
            event = events.pattern.search(self.text, self._at)
            if self.reads_calls and self._bare(events, event.start() if event else len(self.text)):
                return self
            if event is None:
                self._say(len(self.text))
                return self._give_up() if self._mentioned and not self.calls else self
            self._say(event.start())
            kind = str(event.lastgroup)
            if kind == "thought":
                self._think(event)
                continue
            read = self._mention() if kind == "stray" else self._call(events.formats[kind])
            if read or self._was_thought(event.start()):
                continue
            if self.reads_calls:
                return self._give_up()
            self._say(event.end())

    def _say(self, end: int) -> None:
        """Add the text up to `end` to the words."""
        self._said[-1].append(self.text[self._at : end])
        self._at = end

    def _call(self, form: CallFormat) -> bool:
        """Read calls in the given format at the current position; return whether there were any."""
        found = form.read(self.text, self._at, self.tools)
        if found is None or found.end <= self._at:
            return False
        if not self.reads_calls and (found.calls or not form.thinks):
            self._say(found.end)
            return True
        self._at = found.end
        self._said[-1].append(found.text)
        if found.calls:
            self.calls += found.calls
            self._said.append([])
        return True

    def _mention(self) -> bool:
        """Return whether the tag here is a word in a sentence; if it is, add it to the words."""
        word = _MENTION.match(self.text, self._at)
        if word is None:
            return False
        self._mentioned = True
        self._say(word.end())
        return True

    def _bare(self, events: _Events, limit: int) -> bool:
        """Read calls without marks if the rest of the text is such calls; return whether the whole text was read."""
        if self._tried or self.calls or not events.bare:
            return False
        begin = _BARE_AT_ONCE.match(self.text, self._at) or _BARE.search(self.text, self._at, limit)
        if begin is None or begin.end() >= limit:
            return False
        self._tried = True
        start = begin.end() if begin.re is _BARE_AT_ONCE else begin.start()
        for form in events.bare:
            found = form.bare(self.text, start) if form.bare else None
            if found is None:
                self._give_up()
                return True
            if found.calls:
                self._say(start)
                self._at, self.calls = found.end, list(found.calls)
                return True
        return False

    def _think(self, event: re.Match[str]) -> None:
        """Read a thought. Calls in a thought are not executed."""
        if event[0] == _CLOSED:
            if not (self._may_close and self._was_thought(event.start())):
                self._say(event.end())
            return
        end = -1 if event[0] in self._never_closed else self.text.find(_THOUGHTS[event[0]], event.end())
        if end < 0:
            self._never_closed.add(event[0])
            self._say(event.end())
            if event.start() == skip_space(self.text, 0):  # otherwise the mark is a word of a sentence
                self._open_thought()
            return
        self._may_close = False
        after = end + len(_THOUGHTS[event[0]])
        thought = self.text[event.end() : end].strip()
        if event[0] == "<think>":
            self._say(after)
        else:
            self._said[-1].append(f"<think>\n{thought}\n{_CLOSED}\n\n" if thought else "")
            self._at = after

    def _open_thought(self) -> None:
        """Read the rest of the text as a thought that never ends, which makes the text malformed."""
        self.malformed = True
        self._say(len(self.text))
        self._tried = True

    def _was_thought(self, start: int) -> bool:
        """Read the text up to a mark that closes a thought as a thought; return whether a mark follows `start`."""
        end = self.text.find(_CLOSED, start) if self._may_close else -1
        self._may_close = False
        if end < 0:
            return False
        self._at = end + len(_CLOSED)
        self.calls.clear()
        self._said = [[self.text[: self._at]]]
        return True

    def _give_up(self) -> Reading:
        """Mark the text as malformed, and return it unchanged except for thoughts before the first call."""
        self.malformed = True
        self._said = [[self.text] if self.calls else [*self._said[0], self.text[self._at :]]]
        self.calls.clear()
        return self


def read_answer(text: str, tools: Tools = ()) -> Reading:
    """Split the text of an answer into words and calls.

    Args:
        text: Text that the model wrote, with the marks of calls.
        tools: Schemas of the offered tools. They give the types of arguments that a format writes as text.
    """
    read = Reading(text, tools).run()
    if tools and not read.calls:  # Llama writes calls in brackets; as a message, the user would read them
        names = "|".join(re.escape(str(tool.get("function", tool).get("name"))) for tool in tools)
        listed = re.fullmatch(rf"\[\s*(?:{names})\(.*\)\s*\]", words_after_thought(read.said), re.DOTALL)
        read.malformed |= listed is not None
    return read


def with_plain_thoughts(text: str) -> str:
    """Return the text of an answer with thoughts between `<think>` and `</think>`; calls stay as they are written."""
    return Reading(text, (), reads_calls=False).run().said


def without_thought(text: str, *, prompted: bool = False) -> str:
    """Return the text after the closed thoughts with which it begins.

    Args:
        text: Text that the model wrote.
        prompted: Whether the text may begin within a thought, which the prompt has opened.
    """
    thought, closed, rest = text.partition(_CLOSED)
    return _LEADING.sub("", rest if prompted and closed and "<think>" not in thought else text)


def words_after_thought(text: str) -> str:
    """Return the words of an answer without its closed thoughts; empty if no words come before an unclosed thought.

    Args:
        text: Text that the model wrote, without calls. The prompt may have opened its first thought.
    """
    words = without_thought(text, prompted=True)
    for mark, end in _THOUGHTS.items():
        before, closed, after = words.rpartition(end)  # the search below then takes linear time
        words = re.sub(f"{re.escape(mark)}.*?{re.escape(end)}", "", before + closed, flags=re.DOTALL) + after
    words = words.strip()
    return "" if words.startswith(tuple(_THOUGHTS)) else words


def write_calls(calls: Sequence[ToolCall], form: str) -> str:
    """Return calls as text in a format of `CALL_FORMATS`.

    Raises:
        DataError: If the format cannot write a call, for example a value that holds the closing tag.
    """
    text = CALL_FORMATS[form].write(calls) if calls else ""
    read = read_answer(text, [_schema_of(call) for call in calls])
    if read.calls != list(calls) or read.malformed:
        raise DataError(
            f"the call {calls[0]!r:.200} cannot be written in the format {form!r}; take another format."
        )
    return text


def _schema_of(call: ToolCall) -> dict[str, Any]:
    texts = {key: {"type": "string"} for key, value in call.arguments.items() if isinstance(value, str)}
    return {"type": "function", "function": {"name": call.name, "parameters": {"properties": texts}}}
