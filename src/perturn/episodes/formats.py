"""Formats of an action in the policy's text: the instruction, the strict parser, and the expert's rendering."""

from collections.abc import Callable
from dataclasses import dataclass

from perturn.episodes.tool_calls import expert_action, parse_text, write_action, write_text


@dataclass(frozen=True)
class Format:
    """One way to write an action."""

    instruction: str
    """Its description in the system text."""
    reminder: str
    """Reminder for a policy that broke it."""
    parse: Callable[[str], str | None]
    """Text of a turn -> the environment's action, or None where the text breaks the format."""
    write: Callable[[str, str], str]
    """(thought, action) -> the text of a turn."""
    native: bool = False
    """Whether actions are tool calls, which an engine may have read already and a chat template writes."""
    stop: tuple[str, ...] = ("\nObservation:",)
    """Where a policy that was not trained on the format is stopped, lest it write the environment's part too."""


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
"""`react` is Yao et al. 2022, arXiv:2210.03629; `action` leaves the thought out; in `plain` the action is all of the
text, even an empty one; in `tools` actions are native tool calls, or a message to the user, and the chat template says
how they are written."""
