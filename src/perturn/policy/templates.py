"""Chat templates that turns can be trained with: ours by name, those of files, and which of ours replaces a stock one.

Ours write what the stock template of their family writes, but for a rule that made earlier text depend on later
messages. The first line of each file says whose it is and what was changed.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from perturn.errors import ConfigError, did_you_mean
from perturn.io.reading import read_text, user_path
from perturn.settings.sections import ModelSettings
from perturn.types import Message

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Template:
    """One of our chat templates."""

    name: str
    text: str
    """Jinja."""

    @property
    def says(self) -> str:
        """Whose it is, and what was changed."""
        return self.text.partition("\n")[0].removeprefix("{#- ").removesuffix(" -#}")


TEMPLATES: Mapping[str, Template] = {
    file.stem: Template(file.stem, file.read_text(encoding="utf-8"))
    for file in sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"), key=lambda file: file.stem)
}
"""Ours by name."""

_TOOL = {"type": "function", "function": {"name": "look", "description": "Look at it.", "parameters": {}}}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _says(text: str, *calls: str) -> Message:
    """An assistant message with calls."""
    made = [
        {"id": name, "type": "function", "function": {"name": "look", "arguments": {"at": name}}}
        for name in calls
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def _result(of: str) -> Message:
    return {"role": "tool", "tool_call_id": of, "content": "red"}


_SYSTEM = {"role": "system", "content": "Play well."}
_IDS = ("call00000", "call00001")
_THOUGHT = "<think>\nIt is dark.\n</think>\n\n"

_PLAIN = (
    [_user("Hi")],
    [_user("Hi"), _says("Hello"), _user("Go")],
    [_SYSTEM, _user("Hi")],
    [_user("Hi"), _says("", _IDS[0]), _result(_IDS[0])],
)
"""Conversations that no rule we changed touches; a stock template is recognised by what it writes of them."""

_OF_AGENTS = (
    [_SYSTEM, _user("Hi"), _says("Hello"), _user("Go"), _says("Gone")],
    [_user("Hi"), _says(_THOUGHT + "Hello"), _user("Go"), _says(_THOUGHT + "Gone")],
    [_user("Hi"), _says("Both", *_IDS), _result(_IDS[0]), _result(_IDS[1]), _says("Seen"), _user("Go")],
)
"""Conversations that show whether a stock template serves."""


def choose_template(tokenizer: Any, wanted: str | None) -> str | None:
    """Text of the chat template to use instead of the tokenizer's own, if any.

    Args:
        tokenizer: A Hugging Face tokenizer.
        wanted: Name of one of ours, a file, or Jinja; None: the tokenizer's own (of several, the default one), or ours
            in place of a stock one that does not serve many turns.

    Raises:
        ConfigError: If there is no such template.
    """
    if wanted is not None:
        return read_template(wanted, "chat_template")
    if isinstance(tokenizer.chat_template, dict):
        return str(tokenizer.chat_template.get("default", "")) or None
    ours = replacement(tokenizer)
    if ours is not None:
        _announce(tokenizer.name_or_path, ours)
        return ours.text
    if "strftime_now" in (tokenizer.chat_template or ""):
        _warn_of_clock(tokenizer.name_or_path)
    return None


def with_template(tokenizer: Any, text: str) -> Any:
    """The tokenizer with a chat template of its own, which is saved with a policy, so that it is served as trained."""
    if tokenizer.chat_template == text:
        return tokenizer
    own = copy.copy(tokenizer)
    own.chat_template = text
    return own


def chat_template(settings: ModelSettings) -> str | None:
    """Text of the chat template that a recipe names, if any."""
    named = settings.chat_template
    return None if named is None else read_template(named, "model.chat_template")


def read_template(wanted: str, where: str) -> str:
    """Name of one of ours, a file, or Jinja -> Jinja.

    Raises:
        ConfigError: If it is none of them.
    """
    if wanted in TEMPLATES:
        return TEMPLATES[wanted].text
    if "{{" in wanted or "{%" in wanted:
        return wanted
    file = user_path(wanted, where)
    if not file.exists():
        raise ConfigError(
            f"{where} must be a name, a file or Jinja, and {wanted!r:.200} is neither a template of ours nor a file."
            f"{did_you_mean(wanted, TEMPLATES)}"
        )
    return read_text(file, ConfigError, f"Correct {where}.", longest=1 << 20)


def replacement(tokenizer: Any) -> Template | None:
    """The template of ours that is to be used in place of a tokenizer's own, if any.

    Its own is recognised by what it writes, so that all revisions of a stock template count. It stays where it can
    write the conversations of agents that ours can, each as the beginning of the next.
    """
    own = tokenizer.chat_template
    if not isinstance(own, str):
        return None
    for ours in TEMPLATES.values():
        if _is_stock_of(tokenizer, own, ours.text):
            talks = [talk for talk in _OF_AGENTS if _write(tokenizer, ours.text, talk) is not None]
            return None if all(_serves(tokenizer, own, talk) for talk in talks) else ours
    return None


def _is_stock_of(tokenizer: Any, own: str, ours: str) -> bool:
    """Whether two templates write the plain conversations alike, as far as both can, and at least the first two."""
    for number, talk in enumerate(_PLAIN):
        old, new = (_write(tokenizer, each, talk, date_string="26 Jul 2024") for each in (own, ours))
        if old != new and (number < 2 or None not in (old, new)):
            return False
    return True


def _serves(tokenizer: Any, template: str, talk: list[Message]) -> bool:
    """Whether what a template writes before and after each turn of the policy begins what it writes of the whole."""
    whole = _write(tokenizer, template, talk)
    said = [index for index, each in enumerate(talk) if each["role"] == "assistant"]
    parts = [_write(tokenizer, template, talk, end) for index in said for end in (index, index + 1)]
    closing = tokenizer.eos_token or ""  # after the last message alone, where some templates end the text
    return whole is not None and all(part and whole.startswith(part.removesuffix(closing)) for part in parts)


def _write(
    tokenizer: Any, template: str, talk: list[Message], end: int | None = None, **more: str
) -> str | None:
    """The beginning of a conversation as a template writes it; None if it refuses."""
    messages = talk[:end]
    tools = [_TOOL] if any(each["role"] == "tool" for each in talk) else None
    try:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=template,
                add_generation_prompt=messages[-1]["role"] != "assistant",
                tokenize=False,
                **more,
            )
        )
    except Exception:  # noqa: BLE001  a template is code of others
        return None


@cache
def _announce(model: str, ours: Template) -> None:
    """Say once that a stock template was recognised."""
    _logger.warning(
        "the chat template of %r is the stock one of %s, which does not serve many turns; Perturn's of that name is "
        "used in play and training. %s",
        model,
        ours.name,
        ours.says,
    )


@cache
def _warn_of_clock(model: str) -> None:
    """Say once that a template's text depends on the day."""
    _logger.warning(
        "the chat template of %r reads the clock: a policy may be trained on another text than it played the day "
        "before. Give one with a fixed date with `chat_template`.",
        model,
    )
