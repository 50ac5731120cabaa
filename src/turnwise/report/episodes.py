"""Which episodes the report shows turn by turn, and what it shows of each turn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.report.folder import Run, aligned_policy, score
from turnwise.types import Trajectory

_LONGEST = 4000


@dataclass(frozen=True)
class ShownTurn:
    """One turn as the page has it."""

    number: int
    observation: str
    action: str
    reward: float
    valid: bool
    confidence: float | None = None
    weight: float | None = None
    high: bool = False
    """Whether the turn carries the highest weight of its episode pair, where weights differ."""


@dataclass(frozen=True)
class ShownEpisode:
    """One trajectory as the page has it."""

    title: str
    trajectory: Trajectory
    score: float
    prompt: str
    turns: list[ShownTurn]


@dataclass(frozen=True)
class Comparison:
    """Two episodes of one task, side by side."""

    title: str
    caption: str
    episodes: tuple[ShownEpisode, ShownEpisode]


def shown(run: Run) -> list[Comparison]:
    """One preference pair, then the tasks that alignment gained and lost most on."""
    comparisons = []
    index = pair_shown(run)
    if index is not None:
        comparisons.append(_pair(run, index))
    aligned = aligned_policy(run.evaluation)
    if "sft" in run.evaluation and aligned is not None:
        comparisons += _before_after(run.evaluation["sft"], run.evaluation[aligned], aligned)
    return comparisons


def pair_shown(run: Run) -> int | None:
    """The first pair whose rejected side has turns of more than one weight; failing that, the first pair."""
    if not run.pairs:
        return None
    mixed = (i for i, row in enumerate(run.confidence) if len(set(row["rejected"]["weight"])) > 1)
    return next(mixed, 0)


def _pair(run: Run, index: int) -> Comparison:
    pair = run.pairs[index]
    row: Mapping[str, Any] = run.confidence[index] if run.confidence else {}
    weights = [weight for side in row.values() for weight in side["weight"]]
    highest = max(weights) if len(set(weights)) > 1 else None
    return Comparison(
        title="A preference pair: expert and explored",
        caption=f"Pair {index + 1}, task {pair.chosen.task.id}. "
        "The first pair whose rejected episode has turns of more than one weight, or else the first.",
        episodes=(
            _episode("chosen (expert)", pair.chosen, row.get("chosen"), highest),
            _episode("rejected (explored)", pair.rejected, row.get("rejected"), highest),
        ),
    )


def _before_after(before: Sequence[Trajectory], after: Sequence[Trajectory], name: str) -> list[Comparison]:
    """The task with the largest gain and the one with the largest loss; one task if none differs."""
    old = {trajectory.key: trajectory for trajectory in before}
    both = [(old[new.key], new) for new in after if new.key in old]
    if not both:
        return []
    gain, loss = max(both, key=_change), min(both, key=_change)
    picked = []
    if _change(gain) > 0:
        picked.append(("Before and after alignment: the largest gain", gain))
    if _change(loss) < 0:
        picked.append(("Before and after alignment: the largest loss", loss))
    return [
        Comparison(title, f"Task {sides[0].task.id}.", (_episode("sft", sides[0]), _episode(name, sides[1])))
        for title, sides in picked or [("Before and after alignment: no task differs", both[0])]
    ]


def _change(sides: tuple[Trajectory, Trajectory]) -> float:
    return score(sides[1]) - score(sides[0])


def _episode(
    title: str, trajectory: Trajectory, row: Mapping[str, Any] | None = None, highest: float | None = None
) -> ShownEpisode:
    confidence, weight = (row["confidence"], row["weight"]) if row else ([], [])
    turns = [
        ShownTurn(
            number=index + 1,
            observation=_clip(turn.observation_text),
            action=_clip(_action_text(turn.action.text, turn.action.tool_calls)),
            reward=turn.reward,
            valid=turn.valid,
            confidence=confidence[index] if index < len(confidence) else None,
            weight=weight[index] if index < len(weight) else None,
            high=index < len(weight) and weight[index] == highest,
        )
        for index, turn in enumerate(trajectory.turns)
    ]
    prompt = "\n\n".join(
        f"[{message['role']}] {message.get('content') or ''}" for message in trajectory.prompt
    )
    return ShownEpisode(title, trajectory, score(trajectory), _clip(prompt), turns)


def _action_text(text: str, tool_calls: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(
        [*([text] if text else []), *(json.dumps(call, ensure_ascii=False) for call in tool_calls)]
    )


def _clip(text: str) -> str:
    return (
        text if len(text) <= _LONGEST else f"{text[:_LONGEST]} … ({len(text) - _LONGEST:,} more characters)"
    )
