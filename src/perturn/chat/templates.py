"""Perturn's chat templates for training on many turns, and recognition of the stock templates that they replace.

A template of Perturn writes the same text as the stock template of its model family, except for rules that make earlier
text depend on later messages. The first line of each file gives its origin and the changes.
"""

from __future__ import annotations

import copy
import logging
import re
from datetime import date
from functools import cache
from operator import ne
from typing import Any

from perturn.chat.template_variants import TEMPLATES, Template
from perturn.config.sections import ModelSettings
from perturn.errors import ConfigError, check_known
from perturn.io.read_input import read_text, user_path
from perturn.types import Message

_logger = logging.getLogger(__name__)


_TOOL = {"type": "function", "function": {"name": "look", "description": "Look at it.", "parameters": {}}}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _says(text: str, *calls: str, reasoning: str = "") -> Message:
    """Return an assistant message.

    Args:
        text: Content.
        calls: Ids of tool calls.
        reasoning: Thought in the field `reasoning_content`; empty: no such field.
    """
    made = [
        {"id": name, "type": "function", "function": {"name": "look", "arguments": {"at": name}}}
        for name in calls
    ]
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if made:
        message["tool_calls"] = made
    return message


def _result(of: str) -> Message:
    return {"role": "tool", "tool_call_id": of, "content": "red"}


_SYSTEM = {"role": "system", "content": "Play well."}
_IDS = ("call00000", "call00001")
_DARK = "It is dark."
_THOUGHT = f"<think>\n{_DARK}\n</think>\n\n"

_ASKED = ([_user("Hi")], [_SYSTEM, _user("Hi")])
_ANSWERED = ([_user("Hi"), _says("Hello")], [_user("Hi"), _says("Hello"), _user("Go")])
"""Two groups of conversations by which a stock template is recognised. It must render the whole first group, and at
least one conversation of the second group, like Perturn's template. No change of Perturn affects both conversations of
the second group."""

_THOUGHTFUL = [_user("Hi"), _says("Hello", reasoning=_DARK)]
"""Conversation that decides between two templates of Perturn if both match."""

_CALLED = [_user("Hi"), _says("", _IDS[0]), _result(_IDS[0])]
"""Conversation with a tool call. A stock template that renders it differently from Perturn's template is replaced."""

_OF_AGENTS = (
    [_SYSTEM, _user("Hi"), _says("Hello"), _user("Go"), _says("Gone")],
    [_user("Hi"), _says(_THOUGHT + "Hello"), _user("Go"), _says(_THOUGHT + "Gone")],
    [_user("Hi"), _says("Hello", reasoning=_DARK), _user("Go"), _says("Gone", reasoning="It is lit.")],
    [_user("Hi"), _says("One", _IDS[0]), _result(_IDS[0]), _says("Seen"), _user("Go")],
    [_user("Hi"), _says("Both", *_IDS), _result(_IDS[0]), _result(_IDS[1]), _says("Seen"), _user("Go")],
)
"""Conversations that test whether a stock template can be used for many turns."""

_DAY = date(2024, 7, 26)
"""Fixed date in Perturn's templates; it also replaces today's date in other templates."""
_CLOCK = re.compile(r"""strftime_now(?:\(\s*["']([^"']+)["']\s*\)|\s+is\s+(?:not\s+)?defined)""")
_FIXED = "{%- macro strftime_now(form) -%}"  # beginning of a template whose date is fixed
_MARK = re.compile(
    r"<[|｜][^<>\s]+>|<[^<>|\s]+[|｜]>|</?s>|<bos>|<\w+_of_turn>|\[(?!/?INST)/?[A-Za-z_]{3,}\]"
)
"""Pattern of control tokens in a text; it excludes [INST], which is no token of Llama 2."""
_EMPTY_THOUGHT = re.compile(r"(?:<think>\s*|(?<=>))</think>\s*|<\|channel>thought\n<channel\|>")
_DOUBLE = re.compile(r"</think>\s*<think>")
"""Pattern of an empty thought before a thought, from a template that ignores thoughts in the content."""


def choose_template(tokenizer: Any, wanted: str | None) -> str | None:
    """Return the text of the chat template to use, with a fixed date; None if there is no template.

    Args:
        tokenizer: A Hugging Face tokenizer.
        wanted: Name of one of Perturn's templates, a file, or Jinja. None: the tokenizer's own template (its default
            if there are several), or Perturn's template if the own is a stock template that fails for many turns.

    Raises:
        ConfigError: If there is no such template.
    """
    own = tokenizer.chat_template
    if wanted is not None:
        own = read_template(wanted, "chat_template")
    elif isinstance(own, dict):
        own = str(own.get("default", ""))
    elif (ours := replacement(tokenizer)) is not None:
        _announce(tokenizer.name_or_path, ours)
        return ours.text
    fixed = _stop_clock(own or "")
    if own and "strftime_now" in own and _FIXED not in own:
        _say_date(tokenizer.name_or_path, fixed != own)
    return fixed or None


def with_template(tokenizer: Any, text: str) -> Any:
    """Return a copy of the tokenizer with another chat template, which is then saved with the policy."""
    if tokenizer.chat_template == text:
        return tokenizer
    own = copy.copy(tokenizer)
    own.chat_template = text
    return own


def chat_template(settings: ModelSettings) -> str | None:
    """Return the text of the chat template that a recipe names; None if it names no template."""
    named = settings.chat_template
    return None if named is None else read_template(named, "model.chat_template")


def read_template(wanted: str, where: str) -> str:
    """Return the Jinja source of a template.

    Args:
        wanted: Name of one of Perturn's templates, a file, or Jinja.
        where: Name of the setting, for the error message.

    Raises:
        ConfigError: If there is no such template or file.
    """
    if wanted in TEMPLATES:
        return TEMPLATES[wanted].text
    if "{{" in wanted or "{%" in wanted:
        return wanted
    file = user_path(wanted, where)
    if not file.exists():
        check_known(
            wanted, TEMPLATES, f"{where} {wanted!r:.200} is neither a template of ours, a file nor Jinja"
        )
    return read_text(file, ConfigError, f"Correct {where}.", longest=1 << 20)


def fitting(tokenizer: Any) -> list[str]:
    """Return the names of Perturn's templates whose control tokens are all known to a tokenizer.

    Templates that write more test prompts like the tokenizer's own template come first. Templates without control
    tokens of their own are returned only if no other template fits.
    """
    known = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(
        tokenizer.all_special_tokens
    )
    marks = {name: _marks(tokenizer, each.text) for name, each in TEMPLATES.items()}
    fit = [name for name, found in marks.items() if found <= known]
    own = {*filter(None, (tokenizer.bos_token, tokenizer.eos_token))}
    wanted = _prompts(tokenizer, tokenizer.chat_template)
    unequal = {name: sum(map(ne, wanted, _prompts(tokenizer, TEMPLATES[name].text))) for name in fit}
    return sorted([name for name in fit if marks[name] - own] or fit, key=unequal.__getitem__)


def accepting(tokenizer: Any, talk: list[Message]) -> list[str]:
    """Return the names of Perturn's templates that fit a tokenizer and can render a conversation."""
    return [name for name in fitting(tokenizer) if _write(tokenizer, TEMPLATES[name].text, talk) is not None]


def with_tools(tokenizer: Any) -> list[str]:
    """Return the names of Perturn's templates that fit a tokenizer, show tools and write their calls."""
    found = []
    for name in fitting(tokenizer):
        asked, called = (_write(tokenizer, TEMPLATES[name].text, _CALLED[:end], [_TOOL]) for end in (1, 2))
        if asked and called and called.count("look") > asked.count("look") > 0:
            found.append(name)
    return found


def _prompts(tokenizer: Any, template: Any) -> list[str | None]:
    """Return test prompts as a template writes them, without and with tools."""
    return [_write(tokenizer, template, talk, tools) for talk in _ASKED for tools in (None, [_TOOL])]


def _marks(tokenizer: Any, template: str) -> set[str]:
    """Return the control tokens that a template writes in two test conversations, without and with tools."""
    texts = (_write(tokenizer, template, _OF_AGENTS[0]), _write(tokenizer, template, _CALLED, [_TOOL]))
    return {mark for text in texts for mark in _MARK.findall(text or "")}


def replacement(tokenizer: Any) -> Template | None:
    """Return the template of Perturn that replaces the tokenizer's own; None if the own template is kept.

    A stock template is recognised by its output, so that all of its revisions are recognised. It is kept if it can
    render the same conversations of many turns as Perturn's template, and each turn only appends text.
    """
    own = tokenizer.chat_template
    if not isinstance(own, str):
        return None
    known = [each for each in TEMPLATES.values() if _is_stock_of(tokenizer, own, each.text)]
    if not known:
        return None
    ours = max(known, key=lambda each: _renders_equally(tokenizer, own, each.text, _THOUGHTFUL))
    talks = [talk for talk in _OF_AGENTS if _serves(tokenizer, ours.text, talk)]
    called = _write(tokenizer, ours.text, _CALLED, [_TOOL])
    serves = called in (None, _write(tokenizer, own, _CALLED, [_TOOL]))
    return None if serves and all(_serves(tokenizer, own, talk) for talk in talks) else ours


def _is_stock_of(tokenizer: Any, own: str, ours: str) -> bool:
    """Return whether two templates render short conversations to equal texts, apart from empty thoughts."""
    for number, talk in enumerate(_ASKED):
        old, new = (_write(tokenizer, each, talk) for each in (own, ours))
        if old != new and (number == 0 or None not in (old, new)):
            return False
    plain, old, new = (
        _write(tokenizer, each, _ASKED[0], tools=tools)
        for each, tools in ((own, None), (own, [_TOOL]), (ours, [_TOOL]))
    )
    if old not in (plain, new) and None not in (old, new):
        return False
    return any(_renders_equally(tokenizer, own, ours, talk) for talk in _ANSWERED)


def _renders_equally(tokenizer: Any, own: str, ours: str, talk: list[Message]) -> bool:
    """Return whether two templates render a conversation to equal texts, apart from empty thoughts."""
    old, new = (_write(tokenizer, each, talk) for each in (own, ours))
    return old is not None and new is not None and _EMPTY_THOUGHT.sub("", old) == _EMPTY_THOUGHT.sub("", new)


def _serves(tokenizer: Any, template: str, talk: list[Message]) -> bool:
    """Return whether a template renders a conversation with all thoughts, and each turn only appends text."""
    tools = [_TOOL] if any(each["role"] == "tool" for each in talk) else None
    whole = _write(tokenizer, template, talk, tools=tools)
    thinks = any(_DARK in each["content"] for each in talk)
    if whole is None or _DOUBLE.search(whole) or (thinks and _DARK not in whole):
        return False
    closing = tokenizer.eos_token or ""  # some templates append it after the end of the last message
    for index, message in enumerate(talk):
        if message["role"] != "assistant":
            continue
        before = _write(tokenizer, template, talk[:index], tools=tools)
        after = _write(tokenizer, template, talk[: index + 1], tools=tools)
        if not before or not after or not whole.startswith(before):
            return False
        closed = after.removesuffix(closing)
        if not whole.startswith(after if closed.endswith(message["content"] or after) else closed):
            return False
    return True


def _stop_clock(template: str) -> str:
    """Return the template with a fixed date, or unchanged if it reads the clock in forms that are not literal."""
    days = {form: _DAY.strftime(form) for form in _CLOCK.findall(template) if form}
    if not days or "strftime_now" in _CLOCK.sub("", template):
        return template
    return f"{_FIXED}{{{{- {days!r}[form] -}}}}{{%- endmacro %}}\n{template}"  # Jinja drops this line break


def _write(
    tokenizer: Any, template: str, messages: list[Message], tools: list[dict[str, Any]] | None = None
) -> str | None:
    """Render a conversation with a template; return None if the template rejects it."""
    try:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=_stop_clock(template),
                add_generation_prompt=messages[-1]["role"] != "assistant",
                tokenize=False,
                date_string=_DAY.strftime("%d %b %Y"),
            )
        )
    except Exception:  # noqa: BLE001  a template may raise anything
        return None


@cache
def _announce(model: str, ours: Template) -> None:
    """Warn once per model that its stock template was recognised and is replaced."""
    what = f"the stock one of {ours.name}, which does not serve many turns"
    if ours.name == "tools":
        what = "plain ChatML, which leaves out tools or their calls"
    _logger.warning(
        "the chat template of %r is %s; Perturn's template %r is used in play and training. %s",
        model,
        what,
        ours.name,
        ours.says,
    )


@cache
def _say_date(model: str, fixed: bool) -> None:
    """Warn once per model that its template gets a fixed date, or that training may see another date than play."""
    told = f"is fixed to {_DAY}" if fixed else "cannot be fixed; give another template with `chat_template`"
    _logger.warning("the chat template of %r reads the clock; its date %s.", model, told)
