"""A conversation on its way into tokens, a turn at a time, at the price of its newest messages.

A chat template takes whole conversations. A walk gives it the newest messages behind the first turn and the last one
alone, and takes what it adds. Most templates write a message alike whatever stands far before it, but nothing says so:
whether the texts of a walk are those of the whole conversation is compared with one rendering of the whole, and a walk
that cannot be compared, or differs, is done again with all messages at each step (`whole`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from perturn.errors import ModelError
from perturn.policy.rendering import ChatTemplate, first_difference
from perturn.types import Action, Message

NO_TURN = -1
"""Turn index of a token that carries no loss."""


@dataclass(frozen=True)
class Piece:
    """Tokens that entered the conversation together."""

    ids: tuple[int, ...]
    role: str
    turn: int
    """Index of the turn whose action these tokens are; `NO_TURN` for text the policy did not write."""


class Walk:
    """Turns the policy reads and writes in alternation: `hear`, `say`, `hear`, ..."""

    def __init__(
        self, template: ChatTemplate, prompt: Sequence[Message], tools: Sequence[Any], whole: bool
    ) -> None:
        """Begin.

        Args:
            template: Messages -> text -> tokens.
            prompt: Messages before the first turn.
            tools: Tool schemas.
            whole: Render all messages at each step, not the first turn, the last and the newest alone.
        """
        self.turns = 0
        """Turns said so far."""
        self.whole = whole
        self.remembers = "namespace" in template.text
        """Whether the template has means to carry something from one message to those after it."""
        self._template, self._tools = template, tools
        self._messages = list(prompt)  # all of them
        self._unheard = list(prompt)
        self._first: list[Message] = []
        self._context: list[Message] = []  # what the newest messages are rendered behind
        self._first_text = self._closed = self._opened = (
            ""  # rendered: first turn, context, context and newest
        )
        self._new: list[Message] = []
        self._heard = self._before = ""
        self._owed = ""  # what closes the last turn, where the policy did not
        self._added: list[str] = []  # the whole text, in parts

    def hear(self, observation: Sequence[Message]) -> Piece:
        """Messages the policy reads, and the opening of its own turn."""
        self._new = [*self._unheard, *observation]
        self._messages += observation
        self._unheard = []
        what = f"a {self._new[-1]['role']} message" if self._new else "an assistant message"
        self._opened = self._template.render([*self._context, *self._new], self._tools, generate=True)
        added = self._template.added(self._closed, self._opened, what)
        self._added.append(added)
        self._heard = self._owed + added
        return Piece(self._template.tokenize_after(self._before, self._heard), _role(self._new), NO_TURN)

    def by_role(self, heard: Piece) -> Iterator[Piece]:
        """The newest messages, divided where the next one begins."""
        start = 0
        known = self._closed.removesuffix(self._owed)
        for count, message in enumerate(self._new[:-1], start=1):
            part = self._template.try_render([*self._context, *self._new[:count]], self._tools)
            if part is None or not (part.startswith(known) and self._opened.startswith(part)):
                continue
            alone = self._template.tokenize_after(self._before, part[len(known) :])
            end = first_difference(alone, heard.ids)
            if end > start:
                yield Piece(heard.ids[start:end], str(message["role"]), NO_TURN)
                start = end
        yield Piece(heard.ids[start:], heard.role, NO_TURN)

    def say(self, action: Action) -> Piece:
        """The policy's own turn: the tokens it sampled, or those of its text."""
        message = action.message()
        said = [*self._new, message]
        template, opened = self._template, self._opened
        answer = template.added(
            opened, template.render([*self._context, *said], self._tools), "an assistant message"
        )
        end = answer.rfind(template.end_text)
        if end < 0:
            raise ModelError(
                f"the chat template did not close an assistant message with {template.end_text!r}."
            )
        written = answer[: end + len(template.end_text)]
        self._check_tool_calls([*self._context, *said], written)
        cut = action.token_ids is not None and not action.ended
        own = answer[:end] if cut else written
        ids = action.token_ids or template.tokenize_after(self._before + self._heard, written)
        self._owed = written[len(own) :]
        self._before = template.end_of(opened + own)
        self._added.append(written)
        self._messages.append(message)
        self._close(said, opened + written)
        self.turns += 1
        return Piece(ids, "assistant", self.turns - 1)

    def confirm(self, open_turn: bool = False) -> None:
        """Compare the texts so far with one rendering of the whole.

        Args:
            open_turn: Whether the policy is to write next.

        Raises:
            ModelError: If they differ.
        """
        if self.whole or self.turns + open_turn <= 3:  # at first all messages are first, last or newest
            return
        text = "".join(self._added)
        whole = self._template.render(self._messages, self._tools, generate=open_turn)
        if not (whole == text if open_turn else whole.startswith(text)):
            raise ModelError("the chat template writes a message otherwise where others stand far before it.")

    def _close(self, said: list[Message], text: str) -> None:
        """Choose what the next messages are rendered behind."""
        if self.turns == 0:
            self._first, self._first_text = said, text
            self._context, self._closed = said, text
        elif self.whole:
            self._context, self._closed = [*self._context, *said], text
        else:  # the next rendering says whether it begins so
            self._closed = self._first_text + text[len(self._closed) :]
            self._context = [*self._first, *said]

    def _check_tool_calls(self, messages: Sequence[Message], written: str) -> None:
        """Refuse a template that leaves out tool calls, so that an action does not reach the tokens.

        Which tool is called is up to the policy, and a template may write a strange name otherwise than it is, such as
        with an escaped quote. So a name that is not found is replaced by a plain one before the template is blamed.
        """
        calls = [dict(call.get("function", call)) for call in messages[-1].get("tool_calls", ())]
        if all(str(call.get("name", "")) in written for call in calls):
            return
        renamed = [
            {"type": "function", "function": {**call, "name": f"probe_{n}"}} for n, call in enumerate(calls)
        ]
        text = self._template.render([*messages[:-1], {**messages[-1], "tool_calls": renamed}], self._tools)
        left_out = [str(call.get("name")) for n, call in enumerate(calls) if f"probe_{n}" not in text]
        if left_out:
            raise ModelError(
                f"the chat template leaves out tool calls: turn {self.turns} calls {left_out[0]!r}, but the text is "
                f"{written!r}. Give a template that writes them with `chat_template`."
            )


def _role(messages: Sequence[Message]) -> str:
    """Who is heard last; the system, where nobody is."""
    return str(messages[-1]["role"]) if messages else "system"
