"""Compute the numbers of a run: scores of its policies, their comparison, and statistics of its sets of episodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from perturn.analysis.episode_numbers import EpisodeNumbers, numbers_of
from perturn.analysis.iteration_table import iteration_rows
from perturn.analysis.number_text import interval, number
from perturn.analysis.run_contents import RecordedRun
from perturn.analysis.turn_errors import error_row
from perturn.episodes.triage_signals import SIGNALS
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


def summary_of(run: RecordedRun) -> dict[str, Any]:
    """Return the numbers of a run in the format of `summary.json`, which `report.summarize` describes."""
    bounded = has_bounded_scores(run)
    explored = _is_bounded(one.score for each in run.iterations for one in each.explored)
    compared = run.compared and compare(*(run.evaluation[policy] for policy in run.compared), bounded=bounded)
    policies = [
        {
            "name": name,
            **policy_row(episodes, bounded=bounded),
            **_passed(episodes),
            "errors": error_row(episodes),
            **_drawn(run, name),
            **_candidates(run, name),
            **_taught(run, name),
            **_extended(run, name),
        }
        for name, episodes in run.evaluation.items()
    ]
    return {
        "policies": policies,
        "comparison": comparison_row(compared, *run.compared) if run.compared and compared else None,
        "by_kind": _by_kind(run.evaluation, bounded),
        "protocol": run.protocol,
        "unfinished": list(run.unfinished),
        "seconds": sum(float(stage.get("seconds") or 0) for stage in run.stages.values()),
        "iterations": iteration_rows(run.iterations, policies, explored),
    }


def has_bounded_scores(run: RecordedRun) -> bool:
    """Return whether all scores of a run's evaluated episodes lie between 0 and 1."""
    return _is_bounded(one.score for episodes in run.evaluation.values() for one in episodes)


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


def _passed(episodes: Sequence[EpisodeNumbers]) -> dict[str, Any]:
    """Return pass^k and pass@k: how often all of k episodes of a task succeed, and how often at least one does."""
    outcomes: dict[str, list[bool]] = {}
    for one in episodes:
        outcomes.setdefault(one.task, []).append(one.success)
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
    a: Sequence[EpisodeNumbers], b: Sequence[EpisodeNumbers], *, bounded: bool = True
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


def scores_by_task(episodes: Sequence[EpisodeNumbers]) -> dict[str, float]:
    """Return the score of each task, averaged over its samples."""
    scores: dict[str, list[float]] = {}
    for one in episodes:
        scores.setdefault(one.task, []).append(one.score)
    return {task: sum(values) / len(values) for task, values in scores.items()}


def set_rows(run: RecordedRun) -> list[dict[str, Any]]:
    """Return a row of statistics for each set of episodes of a run."""
    sets = {
        "expert trajectories": run.expert,
        "explored trajectories": run.over,
        "chosen side of the pairs": [numbers_of(pair.chosen) for pair in run.pairs],
        "rejected side of the pairs": [numbers_of(pair.rejected) for pair in run.pairs],
    } | {f"evaluation of {name}": items for name, items in run.evaluation.items()}
    return [_set_row(name, items) for name, items in sets.items() if items]


def signal_rows(sets: Mapping[str, Sequence[EpisodeNumbers]]) -> list[dict[str, Any]]:
    """Return, for each signal, the share of episodes that show it, and the success rates with and without it."""
    found = {name: [(one.success, one.signals) for one in items] for name, items in sets.items()}
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


def _set_row(name: str, items: Sequence[EpisodeNumbers]) -> dict[str, Any]:
    turns = sum(one.turns for one in items)
    known = any(one.has_outcome for one in items)
    return {
        "name": name,
        "n": len(items),
        "tasks": len({one.task for one in items}),
        "score": sum(one.score for one in items) / len(items) if known else None,
        "success": sum(one.success for one in items) / len(items) if known else None,
        "turns": turns / len(items),
        "truncated": sum(one.truncated for one in items),
        "invalid": sum(sum(one.invalid) for one in items),
        "all_turns": turns,
        "failed": sum(one.failed for one in items),
    }


def policy_row(episodes: Sequence[EpisodeNumbers], *, bounded: bool = True) -> dict[str, Any]:
    """Return the scores of a policy's episodes; `report.summarize` describes them.

    `bounded` says whether the other scores of the run lie between 0 and 1.
    """
    mean = _mean(episodes, bounded)
    success = success_rate([one.success for one in episodes], [one.task for one in episodes])
    turns = sum(one.turns for one in episodes)
    tokens = [one.tokens for one in episodes if one.tokens is not None]
    return {
        "n": len(episodes),
        "mean_score": mean.mean,
        "interval": _ends(mean),
        "success_rate": success.mean,
        "success_interval": _ends(success),
        "mean_turns": turns / len(episodes),
        "turns_p75": _percentile([one.turns for one in episodes], 75),
        "mean_tokens": sum(tokens) / len(tokens) if len(tokens) == len(episodes) else None,
        "invalid_rate": sum(sum(one.invalid) for one in episodes) / turns if turns else None,
        "failed": sum(one.failed for one in episodes),
    }


def _by_kind(evaluation: Mapping[str, Sequence[EpisodeNumbers]], bounded: bool) -> dict[str, dict[str, Any]]:
    kinds = sorted({one.kind for episodes in evaluation.values() for one in episodes})
    table: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    for name, episodes in evaluation.items():
        for kind in kinds:
            its = [one for one in episodes if one.kind == kind]
            if its:
                mean = _mean(its, bounded)
                table[kind][name] = {"n": mean.n, "mean_score": mean.mean, "interval": _ends(mean)}
    return table


def _percentile(counts: Sequence[int], percent: int) -> int:
    """Return a percentile: the smallest count that is at least as large as `percent` percent of all counts."""
    return sorted(counts)[math.ceil(percent * len(counts) / 100) - 1]


def _mean(episodes: Sequence[EpisodeNumbers], bounded: bool) -> Estimate:
    """Return the mean score. If tasks have several episodes, the interval is clustered by task."""
    scores, tasks = [one.score for one in episodes], [one.task for one in episodes]
    if len(set(tasks)) == len(tasks):
        return mean_interval(scores, bounds=_bounds(scores, bounded))
    return replace(cluster_interval(scores, tasks, bounds=_bounds(scores, bounded)), n=len(scores))


def success_rate(solved: Sequence[bool], tasks: Sequence[str]) -> Estimate:
    """Return the success rate of episodes: Wilson's interval, or clustered by task if a task has several episodes."""
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
