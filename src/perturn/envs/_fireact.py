"""ReAct episodes on HotpotQA that others recorded, in the two forms in which FireAct publishes them.

Chen et al. 2023, "FireAct", arXiv:2310.05915. Fine-tuning rows have the question in `instruction` and the episode in
`output`; rollouts have `traj`, a list of messages that begins with the question.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturn.envs._rows import refuse, text_of
from perturn.errors import DataError

_STEP = re.compile(
    r"\s*Thought:[ \t]*(?P<thought>.*?)\s*\nAction:[ \t]*(?P<action>[^\n]+)"
    r"(?:\nObservation:[ \t]*(?P<observation>.*?))?\s*(?=\nThought:|\Z)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Step:
    """One thought and action, and what was observed then."""

    thought: str
    action: str
    observation: str


@dataclass(frozen=True)
class Recorded:
    """One episode."""

    question: str
    steps: tuple[Step, ...]


def read_recorded(file: Path) -> Iterator[tuple[int, Recorded]]:
    """The episodes of a file, each with how many of its question came before.

    One that breaks the form, by two actions in a turn or none, ends where it does; without any step it is left out.

    Raises:
        DataError: If the file cannot be read or an entry is of neither form.
    """
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read: {error}. Correct the path or the file.") from error
    named = entries.items() if isinstance(entries, Mapping) else enumerate(entries, start=1)
    seen: Counter[str] = Counter()
    for name, entry in named:
        where = f"{file}: entry {name}"
        row = entry if isinstance(entry, dict) else refuse(where, "an object", entry)
        recorded = _from_messages(row, where) if "traj" in row else _from_transcript(row, where)
        if recorded.steps:
            yield seen[recorded.question], recorded
            seen[recorded.question] += 1


def _from_transcript(row: Mapping[str, Any], where: str) -> Recorded:
    text = text_of(row, "output", where)
    return Recorded(text_of(row, "instruction", where), tuple(_steps(text)))


def _from_messages(row: Mapping[str, Any], where: str) -> Recorded:
    messages = row["traj"]
    if (
        not messages
        or not isinstance(messages, list)
        or not all(isinstance(message, dict) for message in messages)
    ):
        refuse(f"{where}: traj", "a list of messages", messages)
    question, *said = [text_of(message, "content", f"{where}: traj") for message in messages]
    return Recorded(question, tuple(_steps("\n".join(said))))


def _steps(text: str) -> Iterator[Step]:
    """Steps from the beginning of a text, up to the first place where none follows."""
    at = 0
    while match := _STEP.match(text, at):
        yield Step(match["thought"], match["action"].strip(), match["observation"] or "")
        at = match.end()
        if match["observation"] is None:
            return
