"""A group on the page: the samples of one task side by side, with the weight of each turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import pstdev
from typing import Any
from urllib.parse import urlencode

from perturn.analysis.run_contents import RecordedRun
from perturn.group import groups_of
from perturn.report.episode_view import by_turn
from perturn.types import Trajectory, failed, score, succeeded, unfinished

Key = tuple[str, int]


def credited(run: RecordedRun) -> dict[Key, dict[str, Any]]:
    """Weights of the shown episodes by the run's own credit: `weight` of each turn, `bin`, and `credit`, its name."""
    if not run.credits:
        return {}
    name, rows = next(iter(run.credits.items()))
    return {row.key: {"weight": list(row.weight), "bin": row.bin, "credit": name} for row in rows}


def shown_group(run: RecordedRun, name: str) -> dict[str, Any] | None:
    """The group that tells a reader most, best sample first; None if no task was explored twice.

    Of those whose scores are spread furthest, it is one whose weights differ from turn to turn, and of these the
    shortest.

    Args:
        run: The run.
        name: What the page calls it.

    Returns:
        `task`, `credit` (or None), `samples` (a row each), and the hashes `link` of the group and `beside`
        of its best beside its worst.
    """
    weighed = _weighed(run)
    groups = [group for group in groups_of(run.explored) if len(group) > 1]
    if not groups:
        return None
    group = max(groups, key=lambda each: _telling(each, weighed))
    ranked = sorted(group, key=lambda one: (-score(one), len(one.turns), one.sample))
    where = {"run": name, "set": run.paths.label(run.explored_file)}
    return {
        "task": group[0].task.id,
        "credit": next((row["credit"] for row in credited(run).values()), None),
        "samples": [_row(one, weighed.get(one.key, {}), where) for one in ranked],
        "link": f"#group?{urlencode({**where, 'task': group[0].task.id})}",
        "beside": _link(where, ranked[0], ranked[-1]),
    }


def _weighed(run: RecordedRun) -> dict[Key, Mapping[str, Any]]:
    """Weights of shown episodes: by the credit of groups, or of the pairs they are in."""
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
    """One sample as the page has it."""
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
        "actions": [turn.action.text.strip() for turn in one.turns],
        "valid": [turn.valid for turn in one.turns],
        "link": _link(where, one),
    }


def _outcome(one: Trajectory) -> str:
    if unfinished(one):
        return "goes on"
    return "failed" if failed(one) else "success" if succeeded(one) else "no success"


def _link(where: Mapping[str, str], one: Trajectory, other: Trajectory | None = None) -> str:
    """The hash of an episode, or of two side by side, as `route.js` reads it."""
    words = {**where, "task": one.task.id, "sample": one.sample}
    if other is not None:
        words |= {f"{key}2": value for key, value in where.items()} | {
            "task2": other.task.id,
            "sample2": other.sample,
        }
    return f"#episode?{urlencode(words)}"
