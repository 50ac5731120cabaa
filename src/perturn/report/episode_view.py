"""One episode on the page: its turns, the numbers each turn carries, and its tokens."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from perturn.data.iteration_numbers import is_number
from perturn.types import Message, Trajectory, Turn

LONGEST = 20_000
"""Characters of one text that the page holds; what is cut is counted."""

_ACTION = re.compile(r"\n[ \t]*Action:")


def by_turn(row: Mapping[str, Any], key: str, turns: int) -> tuple[float | None, ...]:
    """The values of a row at the turn each belongs to; None for a turn without one."""
    values = row.get(key) or []
    numbers = row.get("turn") or range(len(values))
    found = dict(zip(numbers, values, strict=False))
    return tuple(_finite(found.get(index)) for index in range(turns)) if values else ()


def own_confidence(turn: Turn) -> float | None:
    """Confidence of the policy that acted: the geometric mean of the probabilities it sampled with."""
    logprobs = turn.action.logprobs
    return math.exp(sum(logprobs) / len(logprobs)) if logprobs else None


def body(
    trajectory: Trajectory,
    prompt: int,
    noted: Mapping[str, Any],
    openings: Mapping[int, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """An episode as the page has it; what is empty or the usual is left out.

    Args:
        trajectory: The episode.
        prompt: Number of its prompt among those the page has.
        noted: `confidence` and `weight` of its turns, as the alignment wrote them, or `weight`, `bin` and name of a
            `credit`; may be empty.
        openings: Number of the prompt of each turn that opens another sequence with one of its own.
    """
    turns = len(trajectory.turns)
    confidence: Sequence[float | None] = by_turn(noted, "confidence", turns)
    by_reference = any(value is not None for value in confidence)
    if not by_reference:
        confidence = [own_confidence(turn) for turn in trajectory.turns]
    found: dict[str, Any] = {
        "prompt": prompt,
        "policy": trajectory.policy,
        "confidence": [None if value is None else round(min(value, 1.0), 4) for value in confidence],
        "by": "reference" if by_reference else "policy",
        "weight": [None if value is None else round(value, 4) for value in by_turn(noted, "weight", turns)],
        "credit": noted.get("credit", ""),
        "bin": noted.get("bin", ""),
        "error": clip(trajectory.error or ""),
    }
    kept = {key: value for key, value in found.items() if value not in ([], "") and not _all_none(value)}
    if not trajectory.is_linear:
        kept["follows"] = [trajectory.parent(index) for index in range(turns)]
        kept["openings"] = {str(turn): number for turn, number in openings.items()}
    return kept | {"turns": [_turn(turn) for turn in trajectory.turns]}


def tokens(trajectory: Trajectory, noted: Mapping[str, Any]) -> dict[str, Any] | None:
    """Tokens of each turn with their log-probabilities, in thousandths of a nat below 0; None if unknown.

    Args:
        trajectory: The episode.
        noted: `ids`, `turn` and `logprobs` of its tokens that carry loss, by the reference; may be empty.
    """
    if noted.get("ids"):
        turns: list[Any] = [None] * len(trajectory.turns)
        for token, turn, logprob in zip(noted["ids"], noted["turn"], noted["logprobs"], strict=True):
            if turn < len(turns):
                turns[turn] = turns[turn] or [[], []]
                turns[turn][0].append(token)
                turns[turn][1].append(_thousandths(logprob))
        return {"by": "reference", "turns": turns}
    turns = [
        [list(turn.action.token_ids), [_thousandths(value) for value in turn.action.logprobs]]
        if turn.action.token_ids and turn.action.logprobs
        else None
        for turn in trajectory.turns
    ]
    return {"by": "policy", "turns": turns} if any(turns) else None


def split_action(text: str) -> tuple[str, str]:
    """A policy's text -> (thought, action), as ReAct or a reasoning model writes them; one may be empty."""
    said, thoughts = text.strip(), []
    while said.startswith("<think>") and "</think>" in said:
        thought, _, said = (part.strip() for part in said.removeprefix("<think>").partition("</think>"))
        thoughts.append(thought)
    action = _ACTION.search(said)
    if said.startswith("Thought:") and action:
        thoughts.append(said[len("Thought:") : action.start()].strip())
        said = said[action.end() :].strip()
    elif said.startswith("Action:"):
        said = said.removeprefix("Action:").strip()
    elif not thoughts:
        return "", text
    return "\n".join(part for part in thoughts if part), said


def message_text(message: Message) -> str:
    """The content of a message as text; parts that are not text are shown as JSON."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text") or json.dumps(part)) for part in content)
    return str(content or "")


def clip(text: str) -> str:
    """A text no longer than the page holds."""
    extra = len(text) - LONGEST
    return text if extra <= 0 else f"{text[:LONGEST]} … ({extra:,} more characters)"


def _turn(turn: Turn) -> dict[str, Any]:
    thought, action = split_action(turn.action.text)
    found = {
        "o": clip(_observation(turn.observation)),
        "h": clip(thought),
        "a": clip(action),
        "call": [clip(json.dumps(call, ensure_ascii=False)) for call in turn.action.tool_calls],
        "r": turn.reward if turn.reward else "",
        "bad": 1 if not turn.valid else "",
        "cut": 1 if not turn.action.ended else "",
    }
    return {key: value for key, value in found.items() if value not in ("", [])}


def _observation(messages: Sequence[Message]) -> str:
    roles = {message["role"] for message in messages}
    texts = [message_text(message) for message in messages]
    if roles <= {"user"}:
        return "\n".join(texts)
    return "\n".join(f"[{message['role']}] {text}" for message, text in zip(messages, texts, strict=True))


def _thousandths(logprob: float) -> int:
    return max(0, round(-1000 * logprob)) if math.isfinite(logprob) else 99_999


def _finite(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _all_none(value: Any) -> bool:
    return isinstance(value, list) and all(item is None for item in value)
