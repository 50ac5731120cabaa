"""Formats in which a policy writes actions: instruction, strict parser, and writer for expert episodes."""

from collections.abc import Callable
from dataclasses import dataclass

from perturn.episodes.tool_calls import expert_action, parse_text, write_action, write_text


@dataclass(frozen=True)
class Format:
    """Format in which a policy writes an action."""

    instruction: str
    """Description of the format, added to the system message."""
    reminder: str
    """Reminder for a policy whose text broke the format."""
    parse: Callable[[str], str | None]
    """Function from the text of a turn to the environment's action; None if the text breaks the format."""
    write: Callable[[str, str], str]
    """Function from `(thought, action)` to the text of a turn."""
    native: bool = False
    """Whether actions are native tool calls. An engine may parse these calls, and the chat template writes them."""
    stop: tuple[str, ...] = ("\nObservation:",)
    """Stop strings for a policy that was not trained on the format and would also write the environment's
    observation."""


def _parse_tools(text: str) -> str | None:
    action = parse_text(text)
    return None if action is None else write_action(action)


def _write_tools(thought: str, action: str) -> str:
    return write_text(expert_action(action))


def _parse_react(text: str) -> str | None:
    thought, mark, action = text.strip().partition("\nAction:")
    return _one_line(action) if mark and thought.startswith("Thought:") else None


def _parse_action(text: str) -> str | None:
    before, mark, action = text.strip().partition("Action:")
    return _one_line(action) if mark and not before else None


def _one_line(action: str) -> str | None:
    return None if "\n" in action else action.strip() or None


FORMATS = {
    "react": Format(
        instruction="Answer with one thought and one action, each on its own line:\nThought: ...\nAction: ...",
        reminder="That was not understood. Answer with the two lines 'Thought: ...' and 'Action: ...'.",
        parse=_parse_react,
        write=lambda thought, action: f"Thought: {thought}\nAction: {action}",
    ),
    "action": Format(
        instruction="Answer with one action on one line:\nAction: ...",
        reminder="That was not understood. Answer with the one line 'Action: ...'.",
        parse=_parse_action,
        write=lambda thought, action: f"Action: {action}",
    ),
    "plain": Format(
        instruction="",
        reminder="That was not understood. Write it again.",
        parse=str.strip,
        write=lambda thought, action: action,
        stop=(),
    ),
    "tools": Format(
        instruction="",
        reminder=(
            "That was not understood. Write a call as you were told to, such as\n<tool_call>\n"
            '{"name": "...", "arguments": {"...": "..."}}\n</tool_call>\nwhere that is JSON between tags, or answer '
            "in plain text."
        ),
        parse=_parse_tools,
        write=_write_tools,
        native=True,
        stop=(),
    ),
}
"""Action formats by name. `react`: a thought and an action (Yao et al. 2022, arXiv:2210.03629). The parser is stricter
than ETO's (Song et al. 2024, arXiv:2403.02502), which takes all text after `Action:` and needs no thought. `action`: an
action without a thought. `plain`: the whole text is the action, even if it is empty. `tools`: native tool calls in the
form of the chat template, or a message to the user. Thoughts before the text are not parsed. If the prompt opened the
thought, `plain` cannot distinguish it from the action, and parses it too; `tools` does so if the thought is cut."""
