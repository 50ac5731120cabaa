"""The report: `summary.json` and one self-contained `report.html`, made from the run folder alone."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.errors import RunError
from turnwise.report.folder import Run, aligned_policy, read_run, score
from turnwise.report.page import page
from turnwise.stats import Estimate, mean_interval, paired_comparison, rate_interval
from turnwise.types import Status, Trajectory


def summarize(run: Path) -> dict[str, Any]:
    """The numbers of a run, as `summary.json` holds them.

    A trajectory that FAILED counts as score 0 and no success; `failed` says how many did.
    An end of an interval that the data cannot give is None.

    Args:
        run: The run folder.

    Returns:
        `policies`, `comparison` (the last policy against `sft`, or None), `by_kind` (kind, then policy),
        `protocol` (or None) and `seconds` of all stages.

    Raises:
        RunError: The folder does not exist, holds nothing of a run, or a file of it is malformed.
        DataError: A trajectory or pair in it is malformed.
    """
    return _summary(read_run(run))


def write_report(run: Path) -> Path:
    """Write `summary.json` and `report.html` into the run folder, each whole or not at all.

    Args:
        run: The run folder.

    Returns:
        The path of `report.html`.

    Raises:
        RunError: As for `summarize`, or the folder cannot be written to.
        DataError: As for `summarize`.
    """
    content = read_run(run)
    summary = _summary(content)
    html = page(content, summary)
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    _write_whole(run / "summary.json", text)
    return _write_whole(run / "report.html", html)


def _summary(run: Run) -> dict[str, Any]:
    return {
        "policies": [_policy(name, trajectories) for name, trajectories in run.evaluation.items()],
        "comparison": _comparison(run.evaluation),
        "by_kind": _by_kind(run.evaluation),
        "protocol": run.protocol,
        "seconds": sum(float(stage.get("seconds") or 0) for stage in run.stages.values()),
    }


def _policy(name: str, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    mean = _mean([score(trajectory) for trajectory in trajectories])
    success = rate_interval(sum(_succeeded(trajectory) for trajectory in trajectories), len(trajectories))
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    return {
        "name": name,
        "n": len(trajectories),
        "mean_score": mean.mean,
        "interval": _ends(mean),
        "success_rate": success.mean,
        "success_interval": _ends(success),
        "mean_turns": len(turns) / len(trajectories),
        "invalid_rate": sum(not turn.valid for turn in turns) / len(turns) if turns else None,
        "failed": sum(trajectory.status is Status.FAILED for trajectory in trajectories),
    }


def _comparison(evaluation: Mapping[str, Sequence[Trajectory]]) -> dict[str, Any] | None:
    """The last policy against SFT; None if either is absent or they share no task."""
    last = aligned_policy(evaluation)
    if last is None or "sft" not in evaluation:
        return None
    a, b = _scores_by_task(evaluation[last]), _scores_by_task(evaluation["sft"])
    if not a.keys() & b.keys():
        return None
    result = paired_comparison(a, b, bounds=_bounds([*a.values(), *b.values()]))
    return {
        "a": last,
        "b": "sft",
        "n": result.n,
        "mean_difference": result.mean_difference,
        "interval": [_finite(result.low), _finite(result.high)],
        "p_value": result.p_value,
        "wins": result.wins,
        "losses": result.losses,
        "ties": result.ties,
    }


def _by_kind(evaluation: Mapping[str, Sequence[Trajectory]]) -> dict[str, dict[str, Any]]:
    kinds = sorted({item.task.kind for trajectories in evaluation.values() for item in trajectories})
    table: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    for name, trajectories in evaluation.items():
        for kind in kinds:
            scores = [score(trajectory) for trajectory in trajectories if trajectory.task.kind == kind]
            if scores:
                mean = _mean(scores)
                table[kind][name] = {"n": mean.n, "mean_score": mean.mean, "interval": _ends(mean)}
    return table


def _succeeded(trajectory: Trajectory) -> bool:
    return trajectory.success and trajectory.status is not Status.FAILED


def _scores_by_task(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Score of each task, averaged over its samples."""
    scores: dict[str, list[float]] = {}
    for trajectory in trajectories:
        scores.setdefault(trajectory.task.id, []).append(score(trajectory))
    return {task: sum(values) / len(values) for task, values in scores.items()}


def _mean(scores: Sequence[float]) -> Estimate:
    return mean_interval(scores, bounds=_bounds(scores))


def _bounds(scores: Sequence[float]) -> tuple[float, float] | None:
    """Scores are meant to lie between 0 and 1; an environment that pays otherwise is taken as unbounded."""
    return (0.0, 1.0) if all(0 <= score <= 1 for score in scores) else None


def _ends(estimate: Estimate) -> list[float | None]:
    return [_finite(estimate.low), _finite(estimate.high)]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _write_whole(path: Path, text: str) -> Path:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8", newline="\n")
        partial.replace(path)
    except OSError as error:
        raise RunError(
            f"{str(path)!r} cannot be written: {error}. Free space, or make the folder writable."
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return path
