"""Prepare the results of `perturn measure` for the page: a table of credits, and one episode turn by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perturn.data.run_files import read_note
from perturn.data.run_paths import RunPaths
from perturn.report.episode_view import action_text
from perturn.report.score_headings import HEADINGS, OF_TURNS
from perturn.types import Action


def measured(paths: RunPaths) -> dict[str, Any] | None:
    """Return the newest measurement of a run in the format of the templates; None if there is none.

    Raises:
        RunError: If the file of the measurement is damaged.
    """
    if not paths.all_measured:
        return None
    found = read_note(paths.all_measured[-1], dict[str, Any]) or {}
    return {
        "iteration": found["iteration"],
        "sentences": found["sentences"],
        "unscored": found.get("unscored", ""),
        "counts": counts_said(found),
        "kind": found["world"]["kind"],
        "columns": list(HEADINGS.values()),
        "credits": [
            {"name": name, "cells": [row.get(key) for key in HEADINGS], "cost": row["cost"]}
            for name, row in found["credits"].items()
        ],
        "columns_by_third": list(OF_TURNS.values()),
        "by_third": [
            {"name": name, "third": third, "cells": [scores.get(key) for key in OF_TURNS]}
            for name, row in found["credits"].items()
            for third, scores in row["by_third"].items()
        ],
        "left_out": found["left_out"],
        "episode": _shown(found["by_episode"]),
    }


def counts_said(found: Mapping[str, Any]) -> str:
    """Return sentences on the turns and continuations that were measured or do not count, and on negated weights.

    Args:
        found: Content of `measured.json`. A file from before the counts of explored episodes lacks them, and the text
            leaves them out.
    """
    explored = f" of {found['explored']} explored" if "explored" in found else ""
    said = (
        f"{found['measured']} of {found['turns']} turns were measured, in {found['episodes']}{explored} episodes, of "
        f"{found['tasks']} tasks, with {found['continuations']} continuations from each point."
    )
    if found.get("explored_failed"):
        said += f" {found['explored_failed']} explored episodes FAILED and cannot be measured."
    if found["failed"] + found["came_elsewhere"]:
        said += (
            f" Of {found['played']} continuations, {found['failed']} failed with an error of the environment or the "
            f"engine, and {found['came_elsewhere']} did not come back to their turn; none of them counts. A turn with "
            "fewer than four continuations that count is not measured. If failures depend on the actions, the values "
            "are biased."
        )
    if found.get("few_tasks"):
        said += (
            " There are too few tasks, so intervals are over episodes. They are too narrow, and no credit is called "
            "better or worse than chance."
        )
    negated = [name for name, row in found.get("credits", {}).items() if row.get("by_outcome")]
    if negated:
        said += f" In failed episodes, the weights of {', '.join(negated)} are negated."
    return said


def _shown(episodes: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the failed episode that has the most certain loss at one turn, or else the first episode."""
    if not episodes:
        return None
    lost = [one for one in episodes if not one["success"]] or list(episodes)
    one = min(lost, key=lambda each: min((high for high in each["high"] if high is not None), default=1.0))
    calls = one.get("calls") or [()] * len(one["actions"])  # earlier versions stored only texts
    rows = zip(one["actions"], calls, one["advantage"], one["low"], one["high"], strict=True)
    turns = [
        {
            "turn": number,
            "action": action_text(Action(text, tool_calls=tuple(its))),
            "advantage": None if advantage is None else [advantage, low, high],
            "credits": [weights[number - 1] for weights in one["credits"].values()],
        }
        for number, (text, its, advantage, low, high) in enumerate(rows, start=1)
    ]
    return {"task": one["task"], "sample": one["sample"], "names": list(one["credits"]), "turns": turns}
