"""How an action is written in the policy's text: the instruction, the strict parser, and the expert's rendering."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from perturn.tools import ToolAction, parse_text, read_action, write_action, write_text

_REACT = re.compile(
    r"Thought:[ \t]*(?P<thought>[^\n]*(?:\n(?!Action:)[^\n]*)*)\nAction:[ \t]*(?P<action>[^\n]+)"
)
_ACTION = re.compile(r"Action:[ \t]*(?P<action>[^\n]+)")


@dataclass(frozen=True)
class Format:
    """One way to write an action."""

    instruction: str
    """What the system text says about it."""
    reminder: str
    """What a policy that broke it is told."""
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
    return write_text(read_action(action) or ToolAction(action))


def _parser(pattern: re.Pattern[str]) -> Callable[[str], str | None]:
    def parse(text: str) -> str | None:
        match = pattern.fullmatch(text.strip())
        action = match["action"].strip() if match else ""
        return action or None

    return parse


FORMATS = {
    "react": Format(
        instruction="Answer with one thought and one action, each on its own line:\nThought: ...\nAction: ...",
        reminder="That was not understood. Answer with the two lines 'Thought: ...' and 'Action: ...'.",
        parse=_parser(_REACT),
        write=lambda thought, action: f"Thought: {thought}\nAction: {action}",
    ),
    "action": Format(
        instruction="Answer with one action on one line:\nAction: ...",
        reminder="That was not understood. Answer with the one line 'Action: ...'.",
        parse=_parser(_ACTION),
        write=lambda thought, action: f"Action: {action}",
    ),
    "tools": Format(
        instruction="",
        reminder=(
            "That was not understood. Call a tool with JSON, such as\n<tool_call>\n"
            '{"name": "...", "arguments": {"...": "..."}}\n</tool_call>\nwith nothing after the call, or answer in '
            "plain text."
        ),
        parse=_parse_tools,
        write=_write_tools,
        native=True,
        stop=(),
    ),
}
"""`react` is Yao et al. 2022, arXiv:2210.03629; `action` leaves the thought out; in `tools` actions are native tool
calls, or a message to the user, and the chat template says how they are written."""
