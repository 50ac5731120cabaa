"""Incremental rendering of a conversation with a chat template, message by message.

A chat template renders whole conversations, which is slow for long ones. A walk renders the newest messages only after
a short context: all messages up to the first answer, and the last turn. The text that the newest messages add is the
result, so a step's cost does not depend on the length of the conversation. With an example in the prompt, the first
answer is the example's.

Most templates render a message independently of messages far before it, but nothing guarantees this. So the texts of a
walk are compared with one rendering of the whole conversation. If they differ, or cannot be compared, the walk is
repeated with all messages at each step (`whole`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from perturn.chat.rendering import NO_TURN, ChatTemplate, first_difference
from perturn.chat.tool_probe import check_shown
from perturn.errors import DataError, ModelError
from perturn.io.call_arguments import read_arguments
from perturn.types import Action, Message, Prompt, Trajectory, Turn


@dataclass(frozen=True)
class Piece:
    """Tokens of an observation or an action."""

    ids: tuple[int, ...]
    role: str
    turn: int
    """Index of the turn if the tokens are an action; `NO_TURN` if the policy did not write them."""


class Walk:
    """Renders a conversation by alternate calls of `hear`, for an observation, and `say`, for an action."""

    def __init__(
        self, template: ChatTemplate, prompt: Sequence[Message], tools: Sequence[Any], whole: bool
    ) -> None:
        """Start before the first turn.

        Args:
            template: The chat template.
            prompt: Messages before the first observation.
            tools: Schemas of the tools.
            whole: Whether each step renders all messages, instead of the newest messages after a short context.
        """
        self.turns = 0
        """Number of actions rendered so far."""
        self.whole = whole
        self.written = ""
        """Text of the last action as the template renders it."""
        self.partial = False
        """Whether any message was rendered without all messages before it."""
        self.remembers = "namespace" in template.text
        """Whether the template can store information from one message for later messages."""
        self._template, self._tools = template, tools
        self._messages = list(prompt)  # all messages so far
        self._first: list[Message] = []
        self._context: list[Message] = []  # messages before the newest messages in a rendering
        # Texts of the messages up to the first answer, of the context, and of the context with the newest messages.
        self._first_text = self._closed = self._opened = ""
        self._new: list[Message] = []
        self._heard = self._before = ""
        self._owed = ""  # end of the last turn, if the policy did not write it
        self._added: list[str] = []  # parts of the whole text

    def hear(self, observation: Sequence[Message]) -> Piece:
        """Return the tokens of an observation, including the opening of the policy's answer."""
        self._new = [*([] if self._added else self._messages), *observation]
        self._messages += observation
        self.partial |= len(self._context) + len(self._new) < len(self._messages)
        what = f"a {self._new[-1]['role']} message" if self._new else "an assistant message"
        self._opened = self._template.render([*self._context, *self._new], self._tools, generate=True)
        added = self._template.added(self._closed, self._opened, what)
        self._check_heard(added)
        if not self._added:
            check_shown(self._template, self._new, self._tools)
        self._added.append(added)
        self._heard = self._owed + added
        role = str(self._new[-1]["role"]) if self._new else "system"
        return Piece(self._template.tokenize_after(self._before, self._heard), role, NO_TURN)

    def by_role(self, heard: Piece) -> Iterator[Piece]:
        """Divide the tokens of the newest observation into pieces, one per message if the template allows it."""
        start = exact = (
            0  # tokens before the piece, and before the last boundary of messages that is one of tokens
        )
        known, before = self._closed.removesuffix(self._owed), self._before
        for count, message in enumerate(self._new[:-1], start=1):
            part = self._template.try_render([*self._context, *self._new[:count]], self._tools)
            if part is None or not (part.startswith(known) and self._opened.startswith(part)):
                continue
            text = part[len(known) :]
            alone = self._template.tokenize_after(before, text)
            same = first_difference(alone, heard.ids[exact : exact + len(alone)])
            if exact + same > start:
                yield Piece(heard.ids[start : exact + same], str(message["role"]), NO_TURN)
                start = exact + same
            if same == len(alone):
                exact += same
                known, before = part, text or before
        yield Piece(heard.ids[start:], heard.role, NO_TURN)

    def say(self, action: Action) -> Piece:
        """Return the tokens of an action: its sampled tokens, or the tokens of its text.

        If the action was cut at a token limit, the end of the turn belongs to the next observation.
        """
        message = action.message()
        template, opened = self._template, self._opened
        if action.token_ids and not action.text.strip() and message.keys() == {"role", "content"}:
            message = self._placeholder(message)
        said = [*self._new, message]
        answer = template.added(
            opened, template.render([*self._context, *said], self._tools), "an assistant message"
        )
        text, end = template.before_end(answer, message)
        if not end:
            raise ModelError(
                f"the chat template did not close an assistant message with {template.end_text!r}."
            )
        written = self.written = text + end
        self._check_tool_calls([*self._context, *said], written)
        cut = not action.ended and bool(action.token_ids or text)
        own = text if cut else written
        ids = action.token_ids or template.tokenize_after(self._before + self._heard, own)
        self._owed = written[len(own) :]
        self._before = template.end_of(opened + own, action)
        self._added.append(written)
        self._messages.append(message)
        self._close(said, opened + written)
        self.turns += 1
        return Piece(ids, "assistant", self.turns - 1)

    def _placeholder(self, empty: Message) -> Message:
        """Return an empty sampled answer, with another text in it if the template cannot write empty answers."""
        shown = self._template.try_render([*self._context, *self._new, empty], self._tools) or ""
        return empty if shown.startswith(self._opened) else {**empty, "content": "-"}

    def fork(self) -> Walk:
        """Return an independent copy of the walk in its current state."""
        other = copy(self)
        other._messages, other._added = list(self._messages), list(self._added)
        return other

    def confirm(self, open_turn: bool = False) -> None:
        """Compare the texts so far with one rendering of the whole conversation.

        Args:
            open_turn: Whether the text ends with the opening of the policy's answer.

        Raises:
            ModelError: If the texts differ.
        """
        if not self.partial:
            return
        text = "".join(self._added)
        whole = self._template.render(self._messages, self._tools, generate=open_turn)
        if not (whole == text if open_turn else whole.startswith(text)):
            raise ModelError("the chat template writes a message otherwise where others stand far before it.")

    def _close(self, said: list[Message], text: str) -> None:
        """Choose the context for the next messages.

        Args:
            said: The newest messages, including the action.
            text: Text of the context and the newest messages.
        """
        if self.turns == 0:
            self._first, self._first_text = self._beginning(said, text)
            self._context, self._closed = said, text
        elif self.whole:
            self._context, self._closed = [*self._context, *said], text
        else:  # the next rendering checks whether it starts with this text
            self._closed = self._first_text + text[len(self._closed) :]
            self._context = [*self._first, *said]

    def _beginning(self, said: list[Message], text: str) -> tuple[list[Message], str]:
        """Return the messages up to the first answer and their text; all messages if the text starts differently."""
        count = next(index for index, each in enumerate(said, start=1) if each["role"] == "assistant")
        if count < len(said) and (alone := self._template.try_render(said[:count], self._tools)):
            begun, end = self._template.before_end(alone, said[count - 1])
            if end and text.startswith(begun + end):
                return said[:count], begun + end
        return said, text

    def _check_heard(self, added: str) -> None:
        """Raise a `ModelError` if the template left a message out: a policy would not read it.

        A template may change a text, for example by escapes. So a text that is not found is replaced by a plain word,
        and the template is rejected only if the plain word is not found either.
        """
        for index, message in enumerate(self._new):
            text = self._template.control.quote([message])[0].get("content")
            if message["role"] == "assistant" or not isinstance(text, str) or text.strip() in added:
                continue
            plain = [*self._new[:index], {**message, "content": "probe"}, *self._new[index + 1 :]]
            written = self._template.try_render([*self._context, *plain], self._tools, generate=True)
            if written is not None and "probe" not in written[len(self._closed) :]:
                raise ModelError(
                    f"the chat template leaves out a message of role {message['role']!r} ({text[:40]!r}). Give a "
                    "template that writes it with `chat_template`, or another role, such as system for developer."
                )

    def _check_tool_calls(self, messages: Sequence[Message], written: str) -> None:
        """Raise a `ModelError` if the template left a tool call out: a policy would not learn it.

        A template may change an unusual name, for example by escaping a quote. So a name that is not found is replaced
        by a plain name, and the template is rejected only if the plain name is not found either.
        """
        quoted = self._template.control.quote(messages[-1:])[0]
        calls = [dict(call.get("function", call)) for call in quoted.get("tool_calls", ())]
        if all(str(call.get("name", "")) in written for call in calls):
            return
        plain = [
            {"type": "function", "function": {**call, "name": f"probe_{n}"}} for n, call in enumerate(calls)
        ]
        text = self._template.render([*messages[:-1], {**messages[-1], "tool_calls": plain}], self._tools)
        left_out = [str(call.get("name")) for n, call in enumerate(calls) if f"probe_{n}" not in text]
        if left_out:
            raise ModelError(
                f"the chat template leaves out tool calls: turn {self.turns} calls {left_out[0]!r}, but the text is "
                f"{written!r}. Give a template that writes them {self._template.for_tools}"
            )


class Asked:
    """Tokens of a conversation's prompts. Each prompt extends the previous prompt."""

    def __init__(self, walk: Walk, prompt: Prompt) -> None:
        self.walk = walk
        self.ids = array("i")
        self._begun = prompt.messages, prompt.tools, prompt.template_kwargs
        self._turns: tuple[Turn, ...] = ()
        self._heard: tuple[Message, ...] | None = None
        self._next_look = 0

    def leads_to(self, prompt: Prompt) -> bool:
        """Return whether a prompt extends the last prompt, that is, asks for a later turn of the conversation."""
        known = len(self._turns)
        return (
            len(prompt.turns) > known
            and self._begun == (prompt.messages, prompt.tools, prompt.template_kwargs)
            and self._turns == prompt.turns[:known]
            and self._heard == prompt.turns[known].observation
        )

    def follow(self, prompt: Prompt) -> None:
        """Add the tokens up to the end of a prompt; compare them with the whole each time the turns have doubled."""
        for turn in prompt.turns[len(self._turns) :]:
            if self._heard is None:
                self.ids.extend(self.walk.hear(turn.observation).ids)
            self.ids.extend(self.walk.say(turn.action).ids)
            self._heard = None
        self.ids.extend(self.walk.hear(prompt.observation).ids)
        self._turns, self._heard = prompt.turns, prompt.observation
        if self.walk.partial and (self.walk.turns >= self._next_look or self.walk.remembers):
            self.walk.confirm(open_turn=True)
            self._next_look = 2 * self.walk.turns


def check_turns(trajectory: Trajectory) -> None:
    """Raise a `DataError` if a trajectory has no turns, invalid token ids, or malformed tool calls."""
    if not trajectory.turns:
        raise DataError(f"trajectory of task {trajectory.task.id!r} has no assistant turn; remove the row.")
    for number, turn in enumerate(trajectory.turns):
        action, where = turn.action, f"task {trajectory.task.id!r}: turns[{number}].action"
        for index, token in enumerate(action.token_ids or ()):
            if not 0 <= token < 2**31:
                raise DataError(
                    f"{where}.token_ids[{index}]: expected a token id, got {token:.4g}; remove the row."
                )
        for index, call in enumerate(action.tool_calls):
            function = call.get("function", call)
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise DataError(
                    f"{where}.tool_calls[{index}]: expected the name of a function, got {call!r:.80}; remove the row."
                )
            given = function.get("arguments", {})
            if isinstance(given, str) and read_arguments(given) is None:
                raise DataError(
                    f"{where}.tool_calls[{index}]: expected an object of arguments or its JSON text, got "
                    f"{given!r:.60}; remove the row."
                )
