"""Messages -> text -> tokens: a chat template with its tokenizer, and a conversation on its way through them.

A chat template takes whole conversations. A walk gives it the newest messages behind the first answer, with all before
it, and the last turn alone, and takes what it adds, at the price of its newest messages; a worked example's first
answer is the first one. Most templates write a message alike whatever stands
far before it, but nothing says so: whether the texts of a walk are those of the whole conversation is compared with one
rendering of the whole, and a walk that cannot be compared, or differs, is done again with all messages at each step
(`whole`).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from perturn.errors import DataError, ModelError
from perturn.policy.control import ANCHORS, MARK, ControlTokens, PlainTokens, find_control_tokens
from perturn.policy.thoughts import Thoughts, find_thoughts
from perturn.types import Action, Message, Prompt, Turn

NO_TURN = -1
"""Turn index of a token that carries no loss."""

_KEPT = 128
"""Texts whose tokens are kept."""

_PROBE = "\u2063probe\u2063"


class ChatTemplate:
    """Messages as a tokenizer and its chat template write them."""

    def __init__(self, tokenizer: Any, text: str | None) -> None:
        """Find what ends a turn; `text` is a template's, to use instead of the tokenizer's own.

        Raises:
            ModelError: If there is no template, or nothing that a policy could end its turn with.
        """
        self.tokenizer = tokenizer
        self.text = text or tokenizer.chat_template
        if not self.text:
            raise ModelError(
                f"tokenizer {tokenizer.name_or_path!r} has no chat template; give one with `chat_template`."
            )
        self._known: dict[str, tuple[int, ...]] = {}
        self.special_ids = {*map(int, tokenizer.all_special_ids), *map(int, tokenizer.added_tokens_decoder)}
        self._variables: Mapping[str, Any] = {}
        self._varied: dict[str, ChatTemplate] = {}  # by their variables
        self.control = ControlTokens()
        self.end_id = self._find_end_of_turn()
        self.end_text = self.decode([self.end_id])
        self.call_end_id = self._find_end_of_call()
        """Token that closes a message with calls; in most templates it is the end of any turn."""
        self.call_end_text = self.decode([self.call_end_id])
        self.control = find_control_tokens(tokenizer, self.end_text, self.try_render)
        self._plain = PlainTokens(tokenizer, self.special_ids, self.end_id)

    def with_variables(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """The template with further variables, such as `enable_thinking`."""
        if not variables:
            return self
        key = json.dumps(variables, sort_keys=True)
        if key not in self._varied:
            other = copy(self)
            other._variables = variables
            other.__dict__.pop("thoughts", None)  # may be others
            self._varied[key] = other
        return self._varied[key]

    @cached_property
    def thoughts(self) -> Thoughts:
        """The key of thoughts, and whether the template adds empty ones."""
        return find_thoughts(self._try)

    def _try(self, messages: list[Message]) -> str | None:
        try:
            return self._write(messages, (), generate=False)
        except ModelError:
            return None

    def render(self, messages: Sequence[Message], tools: Sequence[Any], generate: bool = False) -> str:
        """The text of a conversation; with `generate`, up to where the policy starts to write.

        Control tokens in the text of messages and tools are broken up (`perturn.policy.control`).

        Raises:
            ModelError: If the template refuses it, or leaves a system text out of a prompt.
            DataError: If a message has a thought as a field, and the template reads none.
        """
        return self._write(self.thoughts.shown(messages), tools, generate)

    def _write(self, messages: Sequence[Message], tools: Sequence[Any], generate: bool) -> str:
        try:
            text = str(
                self.tokenizer.apply_chat_template(
                    self.control.quote(messages),
                    tools=self.control.quote_values(tools) or None,
                    chat_template=self.text,
                    add_generation_prompt=generate,
                    tokenize=False,
                    **self._variables,
                )
            )
        except Exception as error:  # a template is code of others
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"the chat template cannot render this conversation: {reason}") from error
        system = messages[0].get("content") if messages and messages[0]["role"] == "system" else None
        if generate and isinstance(system, str) and self.control.quote_text(system).strip() not in text:
            raise ModelError(
                f"the chat template of {self.tokenizer.name_or_path!r} leaves out the system text; give one that "
                "writes it with `chat_template` (perturn list templates has ours)."
            )
        return text

    def try_render(
        self, messages: Sequence[Message], tools: Sequence[Any], generate: bool = False
    ) -> str | None:
        """Render a conversation that some templates refuse, such as one that stops after the system message."""
        try:
            return self.render(messages, tools, generate)
        except ModelError:
            return None

    def added(self, before: str, after: str, what: str) -> str:
        """Text that the template appended.

        Raises:
            ModelError: If it changed the text that was already there.
        """
        if after.startswith(before):
            return after[len(before) :]
        same = first_difference(before, after)
        raise ModelError(
            f"the chat template of {self.tokenizer.name_or_path!r} is not append-only: adding {what} changed earlier "
            f"text from {before[same : same + 30]!r} to {after[same : same + 30]!r}. A policy trained on it would see "
            "other tokens than it sampled. Give a template that keeps earlier turns as they are with `chat_template` "
            "(perturn list templates has ours; for models that drop earlier thoughts: the same template without that "
            "rule)."
        )

    def end_of(self, text: str, action: Action) -> str:
        """The end of a turn that decides how the next text is tokenized: the token that closed the turn, if one did."""
        end = next((end for end in (self.end_text, self.call_end_text) if text.endswith(end)), "")
        if not end or not action.token_ids or action.token_ids[-1] not in self.special_ids:
            return end
        return self.decode(action.token_ids[-1:])

    def before_end(self, text: str, message: Message) -> tuple[str, str]:
        """A text up to the token that closes an assistant message, and that token; two empty texts without one."""
        before, end, _ = text.rpartition(self.call_end_text if message.get("tool_calls") else self.end_text)
        return before, end

    def tokenize_after(self, before: str, text: str) -> tuple[int, ...]:
        """Tokens of a text as they are where it follows another one, whose own tokens stay as they are.

        Some tokenizers put a space before whatever they are given, so a text alone may begin with another token. Where
        one would reach over the seam, the text begins with a token of its own, as it does for a policy that continues
        the tokens of the prompt.
        """
        for context in (before, *ANCHORS):
            known, both = self.tokenize(context), self.tokenize(context + text)
            if both[: len(known)] == known:
                return both[len(known) :]
        raise ModelError(
            f"the tokenizer {self.tokenizer.name_or_path!r} changes the tokens of what comes before a text that begins "
            f"with {text[:30]!r}, so turns cannot be told apart; give a `chat_template` whose prompts end in a special "
            "token or a line break."
        )

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Tokens of a text, and nothing besides; broken control tokens in it are plain text.

        The newest ones are kept: an answer is tokenized after them, and sequences of an episode begin alike.
        """
        if text in self._known:
            return self._known[text]
        if any("\ud800" <= each <= "\udfff" for each in text):
            raise DataError(
                "the text has half of a surrogate pair, which no tokenizer reads; correct the row."
            )
        ids = self._tokenize_quoted(text) if MARK in text else self._tokenize(text)
        self._known[text] = ids
        if len(self._known) > _KEPT:
            self._known.pop(next(iter(self._known)), None)
        return ids

    def _tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _tokenize_quoted(self, text: str) -> tuple[int, ...]:
        """Tokens of a text that may hold broken control tokens."""
        before, *parts = self.control.split(text)
        ids = self._tokenize(before)
        for token, following in zip(parts[::2], parts[1::2], strict=True):
            ids += self._plain.tokens(token)
            ids += self.tokenize_after(self._plain.context(token), following) if following else ()
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones with it."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _find_end_of_turn(self) -> int:
        """The special token that closes an assistant message."""
        messages: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        tail = self.render(messages, ()).rpartition(_PROBE)[2]
        for token in self.tokenize(tail):
            if token in self.special_ids:
                return int(token)
        raise ModelError(
            f"the chat template of {self.tokenizer.name_or_path!r} does not close an assistant message with a special "
            f"token (it adds {tail!r}), so a policy could not learn to end its turn; give another `chat_template`."
        )

    def _find_end_of_call(self) -> int:
        """The special token that closes a message with calls, where it is not the end of turn."""
        function = {"name": "probe", "description": "", "parameters": {}}
        tools = [{"type": "function", "function": function}]
        call = {"id": "probe0000", "type": "function", "function": {"name": "probe", "arguments": {}}}
        asked: Message = {"role": "user", "content": "a"}
        opened = self.try_render([asked], tools, generate=True) or ""
        said = (
            self.try_render([asked, {"role": "assistant", "content": "", "tool_calls": [call]}], tools) or ""
        )
        last = self.tokenize(said.rstrip())[-1:]
        if self.end_text in said[len(opened) :] or not self.special_ids.issuperset(last):
            return self.end_id
        return int(last[0]) if last else self.end_id


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the beginning that both have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


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
        """Begin with the messages before the first turn.

        With `whole`, all messages are rendered at each step, not the first answer's, the last and the newest alone.
        """
        self.turns = 0
        """Turns said so far."""
        self.whole = whole
        self.written = ""
        """Text of the last turn as the template writes it."""
        self.partial = False
        """Whether anything was rendered behind less than all that came before it."""
        self.remembers = "namespace" in template.text
        """Whether the template has means to carry something from one message to those after it."""
        self._template, self._tools = template, tools
        self._messages = list(prompt)  # all of them
        self._first: list[Message] = []
        self._context: list[Message] = []  # what the newest messages are rendered behind
        # Rendered: up to the first answer, the context, the context and the newest.
        self._first_text = self._closed = self._opened = ""
        self._new: list[Message] = []
        self._heard = self._before = ""
        self._owed = ""  # what closes the last turn, where the policy did not
        self._added: list[str] = []  # the whole text, in parts

    def hear(self, observation: Sequence[Message]) -> Piece:
        """Messages the policy reads, and the opening of its own turn."""
        self._new = [*([] if self._added else self._messages), *observation]
        self._messages += observation
        self.partial |= len(self._context) + len(self._new) < len(self._messages)
        what = f"a {self._new[-1]['role']} message" if self._new else "an assistant message"
        self._opened = self._template.render([*self._context, *self._new], self._tools, generate=True)
        added = self._template.added(self._closed, self._opened, what)
        self._added.append(added)
        self._heard = self._owed + added
        role = str(self._new[-1]["role"]) if self._new else "system"
        return Piece(self._template.tokenize_after(self._before, self._heard), role, NO_TURN)

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
        text, end = template.before_end(answer, message)
        if not end:
            raise ModelError(
                f"the chat template did not close an assistant message with {template.end_text!r}."
            )
        written = self.written = text + end
        self._check_tool_calls([*self._context, *said], written)
        cut = action.token_ids is not None and not action.ended
        own = text if cut else written
        ids = action.token_ids or template.tokenize_after(self._before + self._heard, written)
        self._owed = written[len(own) :]
        self._before = template.end_of(opened + own, action)
        self._added.append(written)
        self._messages.append(message)
        self._close(said, opened + written)
        self.turns += 1
        return Piece(ids, "assistant", self.turns - 1)

    def fork(self) -> Walk:
        """Another walk from here on, which leaves this one where it is."""
        other = copy(self)
        other._messages, other._added = list(self._messages), list(self._added)
        return other

    def confirm(self, open_turn: bool = False) -> None:
        """Compare the texts so far with one rendering of the whole; `open_turn`: the policy is to write next.

        Raises:
            ModelError: If they differ.
        """
        if not self.partial:
            return
        text = "".join(self._added)
        whole = self._template.render(self._messages, self._tools, generate=open_turn)
        if not (whole == text if open_turn else whole.startswith(text)):
            raise ModelError("the chat template writes a message otherwise where others stand far before it.")

    def _close(self, said: list[Message], text: str) -> None:
        """Choose what the next messages are rendered behind."""
        if self.turns == 0:
            self._first, self._first_text = self._beginning(said, text)
            self._context, self._closed = said, text
        elif self.whole:
            self._context, self._closed = [*self._context, *said], text
        else:  # the next rendering says whether it begins so
            self._closed = self._first_text + text[len(self._closed) :]
            self._context = [*self._first, *said]

    def _beginning(self, said: list[Message], text: str) -> tuple[list[Message], str]:
        """The messages up to the first answer, and their text; all where the text does not begin with it."""
        count = next(index for index, each in enumerate(said, start=1) if each["role"] == "assistant")
        if count < len(said) and (alone := self._template.try_render(said[:count], self._tools)):
            begun, end = self._template.before_end(alone, said[count - 1])
            if end and text.startswith(begun + end):
                return said[:count], begun + end
        return said, text

    def _check_tool_calls(self, messages: Sequence[Message], written: str) -> None:
        """Refuse a template that leaves out tool calls, so that an action does not reach the tokens.

        Which tool is called is up to the policy, and a template may write a strange name otherwise than it is, such as
        with an escaped quote. So a name that is not found is replaced by a plain one before the template is blamed.
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
                f"{written!r}. Give a template that writes them with `chat_template`."
            )


class Asked:
    """The prompts of a conversation, each the beginning of the next."""

    def __init__(self, walk: Walk, prompt: Prompt) -> None:
        self.walk = walk
        self.ids = array("q")
        self._begun = prompt.messages, prompt.tools
        self._turns: tuple[Turn, ...] = ()
        self._heard: tuple[Message, ...] | None = None
        self._next_look = 0

    def leads_to(self, prompt: Prompt) -> bool:
        """Whether the prompt asks for a later turn of the same conversation."""
        known = len(self._turns)
        return (
            len(prompt.turns) > known
            and self._begun == (prompt.messages, prompt.tools)
            and self._turns == prompt.turns[:known]
            and self._heard == prompt.turns[known].observation
        )

    def follow(self, prompt: Prompt) -> None:
        """Walk on to the place where the policy writes next; now and then, compare with the whole."""
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
