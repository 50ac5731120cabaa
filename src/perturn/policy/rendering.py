"""A chat template with its tokenizer: messages -> text -> tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perturn.errors import DataError, ModelError
from perturn.types import Message

_PROBE = "\u2063probe\u2063"

_ANCHORS = ("\n", ":", "a")
"""Texts to tokenize an answer after, where the tokenizer merges its beginning with the end of the prompt."""


class ChatTemplate:
    """Messages as a tokenizer and its chat template write them."""

    def __init__(self, tokenizer: Any, text: str | None) -> None:
        """Find what ends a turn.

        Args:
            tokenizer: A Hugging Face tokenizer.
            text: Template text to use instead of the tokenizer's own.

        Raises:
            ModelError: If there is no template, or nothing that a policy could end its turn with.
        """
        self.tokenizer = tokenizer
        self.text = text or tokenizer.chat_template
        if not self.text:
            raise ModelError(
                f"tokenizer {tokenizer.name_or_path!r} has no chat template; give one with `chat_template`."
            )
        self._newest: tuple[str, tuple[int, ...]] = ("", ())
        self.end_id = self._find_end_of_turn()
        self.end_text = self.decode([self.end_id])

    def render(self, messages: Sequence[Message], tools: Sequence[Any], generate: bool = False) -> str:
        """The text of a conversation; with `generate`, up to where the policy starts to write.

        Raises:
            ModelError: If the template refuses it, or leaves a system text out of a prompt.
        """
        try:
            text = str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) or None,
                    chat_template=self.text,
                    add_generation_prompt=generate,
                    tokenize=False,
                )
            )
        except Exception as error:  # a template is code of others
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ModelError(f"the chat template cannot render this conversation: {reason}") from error
        system = messages[0].get("content") if messages and messages[0]["role"] == "system" else None
        if generate and isinstance(system, str) and system.strip() not in text:
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

    def end_of(self, text: str) -> str:
        """The end of a text that decides how the next is tokenized: the token that closed a turn, if it did."""
        return self.end_text if text.endswith(self.end_text) else ""

    def tokenize_after(self, before: str, text: str) -> tuple[int, ...]:
        """Tokens of a text as they are where it follows another one, whose own tokens stay as they are.

        Some tokenizers put a space before whatever they are given, so a text alone may begin with another token. Where
        one would reach over the seam, the text begins with a token of its own, as it does for a policy that continues
        the tokens of the prompt.
        """
        for context in (before, *_ANCHORS):
            known, both = self.tokenize(context), self.tokenize(context + text)
            if both[: len(known)] == known:
                return both[len(known) :]
        raise ModelError(
            f"the tokenizer {self.tokenizer.name_or_path!r} changes the tokens of what comes before a text that begins "
            f"with {text[:30]!r}, so turns cannot be told apart; give a `chat_template` whose prompts end in a special "
            "token or a line break."
        )

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Tokens of a text, and nothing besides; the newest ones are kept, since an answer is tokenized after them."""
        known, ids = self._newest
        if text == known:
            return ids
        if any("\ud800" <= each <= "\udfff" for each in text):
            raise DataError(
                "the text has half of a surrogate pair, which no tokenizer reads; correct the row."
            )
        ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        self._newest = (text, ids)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones with it."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _find_end_of_turn(self) -> int:
        """The special token that closes an assistant message."""
        messages: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        tail = self.render(messages, ()).rpartition(_PROBE)[2]
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        for token in self.tokenize(tail):
            if token in special:
                return int(token)
        raise ModelError(
            f"the chat template of {self.tokenizer.name_or_path!r} does not close an assistant message with a special "
            f"token (it adds {tail!r}), so a policy could not learn to end its turn; give another `chat_template`."
        )


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the beginning that both have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
