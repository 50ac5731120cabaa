"""A chat template with its tokenizer, which convert messages to text and text to tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from perturn.chat.control_tokens import ANCHORS, MARK, ControlTokens, PlainTokens, find_control_tokens
from perturn.chat.templates import accepting, with_tools
from perturn.errors import DataError, ModelError
from perturn.formats.chat_messages import REASONING
from perturn.io.call_arguments import read_arguments
from perturn.types import Action, Message

NO_TURN = -1
"""Turn index of a token that carries no loss."""

_HALF = re.compile("[\ud800-\udfff]")
"""Pattern of half a surrogate pair."""
_KEPT = 128
"""Largest number of texts whose tokens are cached."""

_PROBE = "\u2063probe\u2063"


class ChatTemplate:
    """A chat template with its tokenizer."""

    def __init__(self, tokenizer: Any, text: str | None) -> None:
        """Find the tokens that end a turn.

        Args:
            tokenizer: A Hugging Face tokenizer.
            text: Template to use instead of the tokenizer's own; None: the tokenizer's own.

        Raises:
            ModelError: If there is no template, or the template ends a turn without a special token.
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
        self._varied: dict[str, ChatTemplate] = {}  # templates by their variables
        self.control = ControlTokens()
        self.end_id = self._find_end_of_turn()
        self.end_text = self.decode([self.end_id])
        self.call_end_id = self._find_end_of_call()
        """Token that ends a message with tool calls; in most templates it equals `end_id`."""
        self.call_end_text = self.decode([self.call_end_id])
        self.control = find_control_tokens(tokenizer, self.end_text, self.call_end_text, self.try_render)
        self._plain = PlainTokens(tokenizer, self.special_ids, self.end_id)

    def with_variables(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """Return the template with additional Jinja variables, such as `enable_thinking`."""
        if not variables:
            return self
        key = json.dumps(variables, sort_keys=True)
        if key not in self._varied:
            other = copy(self)
            other._variables = variables
            other.__dict__.pop("thoughts", None)  # variables may change them
            self._varied[key] = other
        return self._varied[key]

    @cached_property
    def thoughts(self) -> Thoughts:
        """Format in which the template writes thoughts, that is, reasoning before an answer."""
        return find_thoughts(self._try)

    def _try(self, messages: list[Message]) -> str | None:
        try:
            return self._write(messages, (), generate=False)
        except ModelError:
            return None

    def render(self, messages: Sequence[Message], tools: Sequence[Any], generate: bool = False) -> str:
        """Return the text of a conversation; with `generate`, including the opening of the policy's answer.

        Control tokens in the text of messages, tools and variables are broken up (`perturn.chat.control_tokens`).

        Raises:
            ModelError: If the template cannot render the conversation, or leaves a prompt's system text out.
            DataError: If a message has a thought in its own field, and the template does not read this field.
        """
        try:
            return self._write(self.thoughts.shown(messages), tools, generate)
        except ModelError as error:
            if "alternat" in str(error) and self._for_two_in_a_row:
                raise ModelError(f"{str(error).rstrip('.')}. {self._for_two_in_a_row}") from error
            raise

    def _opening(self, tools: Sequence[Any]) -> str:
        """Return the text before an answer with which a conversation begins, such as a template's own system text."""
        one, other = (self._write([{"role": "assistant", "content": text}], tools, False) for text in "AB")
        return one[: first_difference(one, other)]

    def _write(self, messages: Sequence[Message], tools: Sequence[Any], generate: bool) -> str:
        if not messages and generate:
            return self._opening(tools)
        try:
            text = str(
                self.tokenizer.apply_chat_template(
                    self.control.quote(messages),
                    tools=self.control.quote_values(tools) or None,
                    chat_template=self.text,
                    add_generation_prompt=generate,
                    tokenize=False,
                    **self.control.quote_values([self._variables])[0],
                )
            )
        except Exception as error:  # a template may raise anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"the chat template cannot render this conversation: {reason}") from error
        system = messages[0].get("content") if messages and messages[0]["role"] == "system" else None
        if generate and isinstance(system, str) and self.control.quote_text(system).strip() not in text:
            raise ModelError(
                f"the chat template of {self.tokenizer.name_or_path!r} leaves out the system text; give one which "
                "writes it with `chat_template` (perturn list templates shows Perturn's)."
            )
        return text

    @cached_property
    def _for_two_in_a_row(self) -> str:
        """Remedy for a template that rejects two messages of the user in a row; empty if there is none."""
        names = accepting(self.tokenizer, [{"role": "user", "content": text} for text in "ab"])
        accept = f"These templates accept two messages in a row: {', '.join(names)} (`chat_template`)."
        return accept if names else ""

    @cached_property
    def for_tools(self) -> str:
        """Remedy for a template that leaves out tools or their calls, as the end of a sentence."""
        names = with_tools(self.tokenizer)[:3]
        such = f", such as {', '.join(names)}" if names else ""
        return f"with `chat_template`{such} (perturn list templates)."

    def try_render(
        self, messages: Sequence[Message], tools: Sequence[Any], generate: bool = False
    ) -> str | None:
        """Render a conversation; return None if the template rejects it, for example without a user message."""
        try:
            return self._write(self.thoughts.shown(messages), tools, generate)
        except ModelError:
            return None

    def added(self, before: str, after: str, what: str) -> str:
        """Return the text that a template appended when messages were added.

        Args:
            before: Text without the added messages.
            after: Text with the added messages.
            what: The added messages in words, for the error message.

        Raises:
            ModelError: If the template changed earlier text.
        """
        if after.startswith(before):
            return after[len(before) :]
        same = first_difference(before, after)
        raise ModelError(
            f"the chat template of {self.tokenizer.name_or_path!r} is not append-only: adding {what} changed earlier "
            f"text from {before[same : same + 30]!r} to {after[same : same + 30]!r}. A policy trained on it would see "
            "other tokens than it sampled. Give a template that keeps earlier turns as they are with `chat_template` "
            "(see perturn list templates; for models that drop earlier thoughts: this template without that "
            "rule)."
        )

    def end_of(self, text: str, action: Action) -> str:
        """Return the text of the token that ended a turn, or an empty text. It precedes the next text to tokenize."""
        end = next((end for end in (self.end_text, self.call_end_text) if text.endswith(end)), "")
        if not end or not action.token_ids or action.token_ids[-1] not in self.special_ids:
            return end
        return self.decode(action.token_ids[-1:])

    def before_end(self, text: str, message: Message) -> tuple[str, str]:
        """Split a text at the token that ends an assistant message; return two empty texts if there is no such token.

        Returns:
            The text before the token, and the text of the token.
        """
        before, end, _ = text.rpartition(self.call_end_text if message.get("tool_calls") else self.end_text)
        return before, end

    def tokenize_after(self, before: str, text: str) -> tuple[int, ...]:
        """Return the tokens of a text that follows the text `before`, without changing the tokens of `before`.

        Some tokenizers prepend a space to any text, so the first token of a text may depend on the text before it. A
        token never spans the boundary, because a policy also continues the fixed tokens of its prompt.

        Raises:
            ModelError: If the tokenizer changes the tokens of any text before this text.
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
        """Return the tokens of a text, without added special tokens; broken control tokens become plain text.

        The tokens of the newest texts are cached, since sequences of an episode share their first messages.
        """
        if text in self._known:
            return self._known[text]
        if _HALF.search(text):
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
        """Return the tokens of a text, in which each control token is broken into tokens of plain text."""
        before, *parts = self.control.split(text)
        ids = [*self._tokenize(before)]
        for token, following in zip(parts[::2], parts[1::2], strict=True):
            ids += self._plain.tokens(token)
            ids += self.tokenize_after(self._plain.context(token), following) if following else ()
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _find_end_of_turn(self) -> int:
        """Return the id of the special token that ends an assistant message."""
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
        """Return the id of the special token that ends a message with tool calls; by default the end of turn."""
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
    """Return the length of the common prefix of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


_OPEN, _CLOSE = "<think>", "</think>"
_THOUGHT_PROBE = "\u2063thought\u2063"


@dataclass(frozen=True)
class Thoughts:
    """Format in which a chat template writes thoughts."""

    key: str | None
    """Key of a message from which the template reads a thought; None: it reads thoughts only from the content."""
    adds: bool
    """Whether the template starts an answer with an empty thought, even if the content has a thought."""

    def shown(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with thoughts under the template's key, and arguments of tool calls as objects.

        Raises:
            DataError: If a message has a thought in its own field, and the template does not read this field. Also if a
                message has two different thoughts.
        """
        return [self._shown(each) if each["role"] == "assistant" else each for each in messages]

    def _shown(self, message: Message) -> Message:
        message = _with_objects(message) if message.get("tool_calls") else message
        if message.get("reasoning_content") or (self.adds and self.key is not None):
            message = _divided(message)
        if not (thought := message.get("reasoning_content")) or self.key == "reasoning_content":
            return message
        if self.key is None:
            raise DataError(
                f"an assistant message has its thought as a field ({thought[:40]!r}), which the chat template does not "
                "write. Move the thought into content as the template's model writes it, such as between "
                f"{_OPEN} and {_CLOSE}; drop it; or give a template that reads reasoning_content with `chat_template`."
            )
        rest = {key: value for key, value in message.items() if key != "reasoning_content"}
        return {**rest, self.key: thought}

    def refuse_second(self, text: str, where: str) -> None:
        """Reject a content that starts with a thought, if the template would write an empty thought before it.

        Args:
            text: The content of an assistant message.
            where: Location of the content, for the error message.

        Raises:
            DataError: If the answer would have two thoughts, and the template has no key to which to move the thought.
        """
        if self.adds and self.key is None and has_thought(text):
            raise DataError(
                f"{where}: the content begins with a thought, and the chat template opens each answer with an empty "
                "one, so two would be learnt. Drop the thought, or give another template with `chat_template`."
            )


def find_thoughts(render: Callable[[list[Message]], str | None]) -> Thoughts:
    """Find out with test conversations how a chat template writes thoughts.

    Args:
        render: Function that renders a conversation; it returns None if the template rejects it.
    """
    asked: Message = {"role": "user", "content": "a"}

    def says(content: str, **more: str) -> str:
        return render([asked, {"role": "assistant", "content": content, **more}]) or ""

    key = next((key for key in REASONING if _THOUGHT_PROBE in says("b", **{key: _THOUGHT_PROBE})), None)
    before, without = (render([asked]) or "").count(_CLOSE), says("b").count(_CLOSE)
    within = says(f"{_OPEN}\n{_THOUGHT_PROBE}\n{_CLOSE}\n\nb").count(_CLOSE)
    return Thoughts(key, adds=within > without > before)


def has_thought(text: str) -> bool:
    """Return whether a content starts with a thought; its opening tag may be missing, if it ends the prompt."""
    thought, closed, _ = text.partition(_CLOSE)
    return bool(closed) and (thought.lstrip().startswith(_OPEN) or _OPEN not in thought)


def _divided(message: Message) -> Message:
    """Return the message with its thought moved from the content to the field `reasoning_content`.

    Raises:
        DataError: If the field already has a different thought.
    """
    content, field = message.get("content"), message.get("reasoning_content")
    if not isinstance(content, str) or not has_thought(content):
        return message
    thought, _, rest = content.partition(_CLOSE)
    thought = thought.lstrip().removeprefix(_OPEN).strip("\n")
    if field and thought.strip() not in ("", field.strip()):
        raise DataError(
            f"an assistant message holds two different thoughts, {thought[:40]!r} in its content and {field[:40]!r} in "
            "its field. Keep one of them."
        )
    return {**message, "content": rest.lstrip("\n"), "reasoning_content": field or thought}


def _with_objects(message: Message) -> Message:
    """Return the message with the arguments of its tool calls as objects; arguments in JSON text are parsed."""
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        text = function.get("arguments")
        if isinstance(text, str) and (arguments := read_arguments(text)) is not None:
            function = {**function, "arguments": arguments}
            call = {**call, "function": function} if "function" in call else function
        calls.append(call)
    return {**message, "tool_calls": calls}
