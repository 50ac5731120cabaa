"""Prepare episodes for the page: one episode turn by turn, and the samples of a task side by side."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from statistics import pstdev
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

from perturn.analysis.run_contents import RecordedRun
from perturn.data.iteration_numbers import is_number
from perturn.group import groups_of
from perturn.types import Action, Message, Trajectory, Turn, failed, score, succeeded, unfinished

LONGEST = 20_000
"""Maximum length of a text on the page, in characters. The page states how many characters were cut."""

_ACTION = re.compile(r"\n[ \t]*Action:")


def by_turn(row: Mapping[str, Any], key: str, turns: int) -> tuple[float | None, ...]:
    """Return the values of a row by turn, with None for turns without a value."""
    values = row.get(key) or []
    numbers = row.get("turn") or range(len(values))
    found = dict(zip(numbers, values, strict=False))
    return tuple(_finite(found.get(index)) for index in range(turns)) if values else ()


def own_confidence(turn: Turn) -> float | None:
    """Return the sampling policy's confidence: the geometric mean of the probabilities of the sampled tokens."""
    logprobs = turn.action.logprobs
    return math.exp(min(0.0, sum(logprobs) / len(logprobs))) if logprobs else None  # imported ones may be > 0


def _ended_by(trajectory: Trajectory) -> str:
    """Return what the error of an episode did to it, and the error; empty without an error."""
    outcome = "FAILED" if failed(trajectory) else "Truncated" if trajectory.truncated else "Error"
    return f"{outcome}: {trajectory.error}" if trajectory.error else ""


def body(
    trajectory: Trajectory,
    prompt: int,
    noted: Mapping[str, Any],
    openings: Mapping[int, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return an episode in the format that the page reads, without empty and default values.

    Args:
        trajectory: The episode.
        prompt: Number of its prompt among the prompts of the page.
        noted: `confidence` and `weight` of the turns, from the alignment; or `weight`, `bin` and the name of a
            `credit`; or nothing.
        openings: Prompt number of each turn that starts a new sequence with its own prompt.
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
        "error": clip(_ended_by(trajectory)),
    }
    kept = {key: value for key, value in found.items() if value not in ([], "") and not _all_none(value)}
    if not trajectory.is_linear:
        kept["follows"] = [trajectory.parent(index) for index in range(turns)]
        kept["openings"] = {str(turn): number for turn, number in openings.items()}
    return kept | {"turns": [_turn(turn) for turn in trajectory.turns]}


def tokens(trajectory: Trajectory, noted: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the tokens of each turn and their log-probabilities, in thousandths of a nat below 0; None if unknown.

    Args:
        trajectory: The episode.
        noted: `ids`, `turn` and reference `logprobs` of the tokens that carry loss; may be empty.
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
    """Split a policy's text into thought and action, as in ReAct or reasoning models. Either part may be empty."""
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
    """Return the reasoning, content and tool calls of a message as text. Parts other than text are shown as JSON."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text") or json.dumps(part)) for part in content)
    thought = message.get("reasoning_content")
    return "\n".join(str(part) for part in (thought, content, *_written(message.get("tool_calls"))) if part)


def action_text(action: Action) -> str:
    """Return the tool calls and the text of an action without its thought; the whole text if nothing else is left.

    The calls come first, since columns and hovers show only the start of an action.
    """
    _, said = split_action(action.text)
    return "\n".join(filter(None, (*_written(action.tool_calls), said.strip()))) or action.text.strip()


def _written(calls: Sequence[Mapping[str, Any]] | None) -> list[str]:
    return [json.dumps(call, ensure_ascii=False) for call in calls or ()]


def clip(text: str) -> str:
    """Return a text, cut to the maximum length on the page."""
    extra = len(text) - LONGEST
    return text if extra <= 0 else f"{text[:LONGEST]} … ({extra:,} more characters)"


def _turn(turn: Turn) -> dict[str, Any]:
    thought, action = split_action(turn.action.text)
    thoughts = filter(None, (turn.action.reasoning, thought))
    found = {
        "o": clip(_observation(turn.observation)),
        "h": clip("\n".join(thoughts)),
        "a": clip(action),
        "call": [clip(call) for call in _written(turn.action.tool_calls)],
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


Key = tuple[str, int]


def credited(run: RecordedRun) -> dict[Key, dict[str, Any]]:
    """Return the run's own credit of the shown episodes: `weight` of each turn, `bin`, and name of the `credit`."""
    if not run.credits:
        return {}
    name, rows = next(iter(run.credits.items()))
    return {row.key: {"weight": list(row.weight), "bin": row.bin, "credit": name} for row in rows}


def shown_group(run: RecordedRun, name: str) -> dict[str, Any] | None:
    """Return the most informative group of a run, best sample first; None if there is none.

    Args:
        run: The run.
        name: Display name of the run.

    Returns: `task`; `credit` (or None); `samples` (one row for each); and two links within the page: `link` to the
        group, and `beside` to its best and worst sample side by side.
    """
    weighed, group = _weighed(run), most_informative(run)
    if not group:
        return None
    ranked = sorted(group, key=lambda one: (-score(one), len(one.turns), one.sample))
    where = {"run": name, "set": run.paths.label(run.explored_file)}
    return {
        "task": group[0].task.id,
        "credit": next((row["credit"] for row in credited(run).values()), None),
        "samples": [_row(one, weighed.get(one.key, {}), where) for one in ranked],
        "link": f"#group?{urlencode({**where, 'task': group[0].task.id})}",
        "beside": _link(where, ranked[0], ranked[-1]),
    }


def most_informative(run: RecordedRun) -> Sequence[Trajectory]:
    """Return the most informative group of a run; empty without a finished exploration that played a task twice.

    Groups with the largest spread of scores are preferred, then groups whose weights differ between turns, then groups
    with fewer turns.
    """
    if not run.is_explored:
        return ()
    weighed = _weighed(run)
    groups = [group for group in groups_of(run.explored) if len(group) > 1]
    return max(groups, key=lambda each: _telling(each, weighed), default=())


def _weighed(run: RecordedRun) -> dict[Key, Mapping[str, Any]]:
    """Return the weights of the shown episodes, from the credit of their group or else from their pair."""
    found: dict[Key, Mapping[str, Any]] = dict(credited(run))
    for pair, row in zip(run.pairs, run.confidence, strict=False):
        for side in ("chosen", "rejected"):
            one: Trajectory = getattr(pair, side)
            found.setdefault(one.key, {"weight": by_turn(row[side], "weight", len(one.turns))})
    return found


def _telling(
    group: Sequence[Trajectory], weighed: Mapping[Key, Mapping[str, Any]]
) -> tuple[float, bool, float]:
    weights = [set(weighed.get(one.key, {}).get("weight") or ()) for one in group]
    return (
        pstdev(map(score, group)),
        any(len(each) > 1 for each in weights),
        -sum(len(one.turns) for one in group),
    )


def _row(one: Trajectory, noted: Mapping[str, Any], where: Mapping[str, str]) -> dict[str, Any]:
    """Return one sample in the format that the page reads."""
    weights = list(noted.get("weight") or ())
    known = [each for each in weights if each is not None]
    return {
        "sample": one.sample,
        "outcome": _outcome(one),
        "score": score(one),
        "turns": len(one.turns),
        "invalid": sum(not turn.valid for turn in one.turns),
        "bin": str(noted.get("bin") or "").replace("_", " "),
        "weights": weights,
        "range": (min(known), max(known)) if known else None,
        "actions": [action_text(turn.action) for turn in one.turns],
        "valid": [turn.valid for turn in one.turns],
        "link": _link(where, one),
    }


def _outcome(one: Trajectory) -> str:
    if unfinished(one):
        return "goes on"
    return "failed" if failed(one) else "success" if succeeded(one) else "no success"


def _link(where: Mapping[str, str], one: Trajectory, other: Trajectory | None = None) -> str:
    """Return the link to an episode, or to two episodes side by side, in the format that `route.js` reads."""
    words = {**where, "task": one.task.id, "sample": one.sample}
    if other is not None:
        words |= {f"{key}2": value for key, value in where.items()} | {
            "task2": other.task.id,
            "sample2": other.sample,
        }
    return f"#episode?{urlencode(words)}"
