"""Read recorded ReAct episodes on HotpotQA in the two formats of FireAct.

Chen et al. 2023, "FireAct", arXiv:2310.05915. A row for fine-tuning has the question in `instruction` and the episode
in `output`. A rollout has `traj`, a list of messages that starts with the question.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturn.envs.json_rows import refuse, text_of, whole
from perturn.errors import DataError
from perturn.io.read_input import parse_json, read_text

_THOUGHT = re.compile(r"\s*Thought:[ \t]*")
_ACTION = re.compile(r"\nAction:([^\n]+)")
_OBSERVATION = re.compile(r"\nObservation:[ \t]*")
_END = re.compile(r"\s*(?=\nThought:|\Z)")


@dataclass(frozen=True)
class Step:
    """A thought and an action, and the observation after them."""

    thought: str
    action: str
    observation: str


@dataclass(frozen=True)
class Recorded:
    """A recorded episode."""

    question: str
    steps: tuple[Step, ...]


def read_recorded(file: Path) -> Iterator[tuple[int, Recorded]]:
    """Yield the episodes of a file, each with its number among the episodes of the same question, from 0.

    An episode ends before its first malformed step, such as a turn with two actions or none. An episode without a
    valid step has no steps, and no number of its own.

    Raises:
        DataError: If the file cannot be read, or an entry has neither format.
    """
    text = read_text(file, DataError)
    entries = whole(parse_json(text, str(file), DataError), text, str(file))
    if not isinstance(entries, dict | list):
        refuse(str(file), "a list or an object of episodes", entries)
    named = entries.items() if isinstance(entries, dict) else enumerate(entries, start=1)
    seen: Counter[str] = Counter()
    for name, entry in named:
        where = f"{file}: entry {name}"
        row = entry if isinstance(entry, dict) else refuse(where, "an object", entry)
        recorded = _read_row(row, where)
        yield seen[recorded.question], recorded
        seen[recorded.question] += bool(recorded.steps)


def _read_row(row: Mapping[str, Any], where: str) -> Recorded:
    """Parse an episode of either format."""
    if "traj" not in row:
        said = text_of(row, "output", where)
        return Recorded(text_of(row, "instruction", where), tuple(_steps(said)))
    messages = row["traj"]
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        refuse(f"{where}: traj", "a list of messages", messages)
    question, *rest = [text_of(message, "content", f"{where}: traj") for message in messages]
    return Recorded(question, tuple(_steps("\n".join(rest))))


def _steps(text: str) -> Iterator[Step]:
    """Yield the steps at the beginning of a text, up to the first malformed step."""
    at = 0
    while (opened := _THOUGHT.match(text, at)) and (action := _next_action(text, opened.end())):
        thought = text[opened.end() : action.start()].rstrip()
        observed = _OBSERVATION.match(text, action.end())
        if observed is None:
            yield Step(thought, action[1].strip(), "")
            return
        begin = observed.end()
        at = text.find("\nThought:", begin)
        at = len(text) if at < 0 else at
        yield Step(thought, action[1].strip(), text[begin:at].rstrip())


def _next_action(text: str, at: int) -> re.Match[str] | None:
    """Return the next action line that is followed by an observation, a thought or the end of the text."""
    for match in _ACTION.finditer(text, at):
        if _OBSERVATION.match(text, match.end()) or _END.match(text, match.end()):
            return match
    return None
