"""Compute the numbers of a run: scores of its policies, their comparison, and statistics of its sets of episodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from perturn.analysis.iteration_table import iteration_rows
from perturn.analysis.number_text import interval, number
from perturn.analysis.run_contents import RecordedRun
from perturn.analysis.turn_errors import error_row
from perturn.episodes.triage_signals import SIGNALS, signals_of
from perturn.stats import (
    Estimate,
    PairedComparison,
    cluster_interval,
    mean_interval,
    paired_comparison,
    pass_at,
    pass_hat,
    rate_interval,
)
from perturn.types import Trajectory, failed, has_outcome, score, succeeded


def summary_of(run: RecordedRun) -> dict[str, Any]:
    """Return the numbers of a run in the format of `summary.json`, which `report.summarize` describes."""
    bounded = _is_bounded(score(one) for episodes in run.evaluation.values() for one in episodes)
    explored = _is_bounded(one.score for each in run.iterations for one in each.explored)
    compared = run.compared and compare(*(run.evaluation[policy] for policy in run.compared), bounded=bounded)
    policies = [
        {
            "name": name,
            **policy_row(trajectories, bounded=bounded),
            **_passed(trajectories),
            "errors": error_row(trajectories),
            **_drawn(run, name),
            **_candidates(run, name),
            **_taught(run, name),
            **_extended(run, name),
        }
        for name, trajectories in run.evaluation.items()
    ]
    return {
        "policies": policies,
        "comparison": comparison_row(compared, *run.compared) if run.compared and compared else None,
        "by_kind": _by_kind(run.evaluation, bounded),
        "protocol": run.protocol,
        "seconds": sum(float(stage.get("seconds") or 0) for stage in run.stages.values()),
        "iterations": iteration_rows(run.iterations, policies, explored),
    }


def _drawn(run: RecordedRun, policy: str) -> dict[str, Any]:
    """Return the cost of a best-of-n score, which uses several episodes for each task."""
    counts = (run.stages.get(f"evaluate-{policy}") or {}).get("counts") or {}
    if not counts.get("drawn_episodes"):
        return {}
    return {
        "drawn": {
            "episodes": counts["drawn_episodes"],
            "success_rate": counts["drawn_success"] / counts["drawn_episodes"],
            "turns": counts["drawn_turns"],
            "action_tokens": counts.get("drawn_action_tokens", 0),
        }
    }


def _candidates(run: RecordedRun, policy: str) -> dict[str, Any]:
    """Return the cost of a score for which several actions were sampled at each turn."""
    counts = (run.stages.get(f"evaluate-{policy}") or {}).get("counts") or {}
    if not counts.get("candidates"):
        return {}
    return {
        "candidates": {
            "actions": counts["candidates"],
            "action_tokens": counts["candidate_tokens"],
            "turns": counts["turns"],
            "taken_tokens": counts.get("action_tokens", 0),
        }
    }


def _taught(run: RecordedRun, policy: str) -> dict[str, Any]:
    """Return the training data and the fit of the value head that chose the scored episodes or actions."""
    counts = (run.stages.get(f"evaluate-{policy}") or {}).get("counts") or {}
    if not counts.get("value_episodes"):
        return {}
    said = {"episodes": counts["value_episodes"], "tokens": counts["value_tokens"]}
    return {"value_head": said | {"explained": counts.get("value_explained")}}


def _extended(run: RecordedRun, policy: str) -> dict[str, Any]:
    """Return the cost of a score with turn control, including the episodes that best-of-n did not choose."""
    counts = (run.stages.get(f"evaluate-{policy}") or {}).get("counts") or {}
    if "extensions" not in counts:
        return {}
    mark = "drawn_" if counts.get("drawn_episodes") else ""
    return {
        "turn_control": {
            "episodes": counts[f"{mark}episodes"],
            "turns": counts[f"{mark}turns"],
            "action_tokens": counts.get(f"{mark}action_tokens", 0),
            "extended": counts["extended"],
            "extensions": counts["extensions"],
        }
    }


def _passed(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Return pass^k and pass@k: how often all of k episodes of a task succeed, and how often at least one does."""
    outcomes: dict[str, list[bool]] = {}
    for one in trajectories:
        outcomes.setdefault(one.task.id, []).append(succeeded(one))
    most = min(map(len, outcomes.values()))
    if most == 1:
        return {}
    counts = [(len(each), sum(each)) for each in outcomes.values()]
    return {
        name: {str(k): estimate_row(measure(counts, k)) for k in range(1, most + 1)}
        for name, measure in (("pass_hat", pass_hat), ("pass_at", pass_at))
    }


def estimate_row(found: Estimate) -> dict[str, Any]:
    """Return an estimate as JSON data, with None for an infinite or undefined end."""
    return {"mean": found.mean, "interval": _ends(found), "n": found.n}


def compare(
    a: Sequence[Trajectory], b: Sequence[Trajectory], *, bounded: bool = True
) -> PairedComparison | None:
    """Compare two sets of episodes task by task, averaged over the samples of a task; None without a common task.

    `bounded` says whether the other scores of the run lie between 0 and 1.
    """
    first, second = scores_by_task(a), scores_by_task(b)
    if not first.keys() & second.keys():
        return None
    return paired_comparison(first, second, bounds=_bounds([*first.values(), *second.values()], bounded))


def comparison_row(result: PairedComparison, a: str, b: str) -> dict[str, Any]:
    """Return a comparison as JSON data, with None for an infinite or undefined end."""
    return {
        "a": a,
        "b": b,
        "n": result.n,
        "mean_difference": result.mean_difference,
        "interval": _ends(result),
        "p_value": result.p_value,
        "mcnemar_p_value": result.mcnemar_p_value,
        "wins": result.wins,
        "losses": result.losses,
        "ties": result.ties,
    }


def scores_by_task(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the score of each task, averaged over its samples."""
    scores: dict[str, list[float]] = {}
    for trajectory in trajectories:
        scores.setdefault(trajectory.task.id, []).append(score(trajectory))
    return {task: sum(values) / len(values) for task, values in scores.items()}


def set_rows(run: RecordedRun) -> list[dict[str, Any]]:
    """Return a row of statistics for each set of episodes of a run."""
    sets = {
        "expert trajectories": run.expert,
        "explored trajectories": run.over,
        "chosen side of the pairs": [pair.chosen for pair in run.pairs],
        "rejected side of the pairs": [pair.rejected for pair in run.pairs],
    } | {f"evaluation of {name}": items for name, items in run.evaluation.items()}
    return [_set_row(name, items) for name, items in sets.items() if items]


def signal_rows(sets: Mapping[str, Sequence[Trajectory]]) -> list[dict[str, Any]]:
    """Return, for each signal, the share of episodes that show it, and the success rates with and without it."""
    found = {name: [(succeeded(one), signals_of(one)) for one in items] for name, items in sets.items()}
    all_found = [each for episodes in found.values() for each in episodes]
    return [
        {
            "name": signal,
            "counts": {
                name: sum(signal in signals for _, signals in episodes) / len(episodes)
                for name, episodes in found.items()
                if episodes
            },
            "with": _success_rate([ok for ok, signals in all_found if signal in signals]),
            "without": _success_rate([ok for ok, signals in all_found if signal not in signals]),
        }
        for signal in SIGNALS
    ]


def _success_rate(successes: Sequence[bool]) -> Estimate | None:
    return rate_interval(sum(successes), len(successes)) if successes else None


def _set_row(name: str, items: Sequence[Trajectory]) -> dict[str, Any]:
    turns = [turn for item in items for turn in item.turns]
    known = any(map(has_outcome, items))
    return {
        "name": name,
        "n": len(items),
        "tasks": len({item.task.id for item in items}),
        "score": sum(map(score, items)) / len(items) if known else None,
        "success": sum(map(succeeded, items)) / len(items) if known else None,
        "turns": len(turns) / len(items),
        "truncated": sum(item.truncated for item in items),
        "invalid": sum(not turn.valid for turn in turns),
        "all_turns": len(turns),
        "failed": sum(map(failed, items)),
    }


def policy_row(trajectories: Sequence[Trajectory], *, bounded: bool = True) -> dict[str, Any]:
    """Return the scores of a policy's episodes; `report.summarize` describes them.

    `bounded` says whether the other scores of the run lie between 0 and 1.
    """
    mean = _mean(trajectories, bounded)
    success = _success(trajectories)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    written = [turn.action.token_ids for turn in turns]
    return {
        "n": len(trajectories),
        "mean_score": mean.mean,
        "interval": _ends(mean),
        "success_rate": success.mean,
        "success_interval": _ends(success),
        "mean_turns": len(turns) / len(trajectories),
        "turns_p75": _percentile([len(trajectory.turns) for trajectory in trajectories], 75),
        "mean_tokens": None
        if None in written
        else sum(len(ids or ()) for ids in written) / len(trajectories),
        "invalid_rate": sum(not turn.valid for turn in turns) / len(turns) if turns else None,
        "failed": sum(map(failed, trajectories)),
    }


def _by_kind(evaluation: Mapping[str, Sequence[Trajectory]], bounded: bool) -> dict[str, dict[str, Any]]:
    kinds = sorted({item.task.kind for trajectories in evaluation.values() for item in trajectories})
    table: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    for name, trajectories in evaluation.items():
        for kind in kinds:
            its = [trajectory for trajectory in trajectories if trajectory.task.kind == kind]
            if its:
                mean = _mean(its, bounded)
                table[kind][name] = {"n": mean.n, "mean_score": mean.mean, "interval": _ends(mean)}
    return table


def _percentile(counts: Sequence[int], percent: int) -> int:
    """Return a percentile: the smallest count that is at least as large as `percent` percent of all counts."""
    return sorted(counts)[math.ceil(percent * len(counts) / 100) - 1]


def _mean(trajectories: Sequence[Trajectory], bounded: bool) -> Estimate:
    """Return the mean score. If tasks have several episodes, the interval is clustered by task."""
    scores, tasks = [score(one) for one in trajectories], [one.task.id for one in trajectories]
    if len(set(tasks)) == len(tasks):
        return mean_interval(scores, bounds=_bounds(scores, bounded))
    return replace(cluster_interval(scores, tasks, bounds=_bounds(scores, bounded)), n=len(scores))


def _success(trajectories: Sequence[Trajectory]) -> Estimate:
    """Return the success rate. If tasks have several episodes, the interval is clustered by task."""
    solved, tasks = [succeeded(one) for one in trajectories], [one.task.id for one in trajectories]
    if len(set(tasks)) == len(tasks):
        return rate_interval(sum(solved), len(solved))
    return cluster_interval([float(each) for each in solved], tasks)


def _is_bounded(scores: Iterable[float]) -> bool:
    """Return whether all scores lie between 0 and 1."""
    return all(0 <= each <= 1 for each in scores)


def _bounds(scores: Iterable[float], bounded: bool) -> tuple[float, float] | None:
    """Return the bounds of scores: 0 and 1, or None if one of them or another score of the run lies outside."""
    return (0.0, 1.0) if bounded and _is_bounded(scores) else None


def _ends(found: Estimate | PairedComparison) -> list[float | None]:
    return [end if math.isfinite(end) else None for end in (found.low, found.high)]


def headline(summary: Mapping[str, Any]) -> str | None:
    """Return a line with the scores from the first to the last policy; None if fewer than two were scored.

    For a run with one iteration, the line shows base, SFT and the aligned policy. For a run with several, it shows the
    policy before the loop and the last policy.

    Args:
        summary: Contents of `summary.json`.
    """
    rows = {str(row["name"]): row for row in summary["policies"]}
    if len(rows) < 2:
        return None
    names, online = list(rows), len(summary["iterations"]) > 1
    start = "sft" if online and "sft" in names[:-1] else names[0]
    shown = [start, names[-1]] if online or "sft" not in names[1:-1] else [start, "sft", names[-1]]
    alike = len({rows[name]["n"] for name in shown}) == 1
    labels = [f"start ({shown[0]})", f"last ({shown[1]})"] if online else shown
    scores = [
        f"{label} {number(row['mean_score'])} {interval(row['interval'])}{'' if alike else _n(row)}"
        for label, row in zip(labels, (rows[name] for name in shown), strict=True)
    ]
    end = f"; n = {rows[start]['n']}, 95\u00a0% intervals." if alike else "; 95\u00a0% intervals."
    return f"Average score: {' → '.join(scores)}{end}"


def _n(row: Mapping[str, Any]) -> str:
    return f" (n = {row['n']})"
