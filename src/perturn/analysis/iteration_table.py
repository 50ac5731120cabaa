"""Read the numbers of each iteration of a run: explored episodes, their bins, training and scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from perturn.data.episode_outcomes import Outcome, read_outcomes
from perturn.data.iteration_numbers import STAGES, account_of, is_number, ledger_of, seconds_of, training_of
from perturn.data.run_files import Metrics, Ranked, read_note, read_notes
from perturn.data.run_paths import RunPaths, iteration_of
from perturn.stats import Estimate, cluster_interval


@dataclass(frozen=True)
class Iteration:
    """Numbers of one iteration, read from its files."""

    number: int
    explored: list[Outcome]
    """Explored episodes that have ended."""
    unfinished: int
    """Number of explored episodes that continue in the next iteration."""
    counts: Mapping[str, Any]
    """Counts of the iteration's credit, pairs or outcomes."""
    metrics: list[dict[str, Any]]
    """Entries of the training metrics, one row for each optimizer step."""
    agreement: float | None
    """Mean absolute difference between log-probabilities at sampling and in training, in nats per token."""
    ranking: dict[str, Any] | None
    """Ranking accuracy of the policy on its pairs, before and after training."""
    seconds: float
    """Time spent in the stages of the iteration, including the evaluation of its policy."""


def read_iterations(paths: RunPaths, stages: Mapping[str, Mapping[str, Any]]) -> list[Iteration]:
    """Return the iterations of a run that have explored episodes or counts, in order.

    Args:
        paths: Paths of the run.
        stages: Stages in the manifest.

    Raises:
        RunError: If an episode or an entry is malformed.
    """
    found = (_read(paths, mark, stages) for mark in paths.marks)
    return [each for each in found if each.explored or each.counts]


def is_explored(stages: Mapping[str, Mapping[str, Any]], mark: str) -> bool:
    """Return whether the exploration of an iteration is finished. Until then, the first episodes to end are short.

    Imported episodes, and episodes of a recipe without iterations, may have no stage and count as finished.

    Args:
        stages: Stages in the manifest.
        mark: End of the names of the iteration's stages.
    """
    return not stages or bool((stages.get(f"explore{mark}") or {}).get("done", not mark))


def _read(paths: RunPaths, mark: str, stages: Mapping[str, Mapping[str, Any]]) -> Iteration:
    notes = {name: stages.get(f"{name}{mark}") or {} for name in STAGES}
    played = read_outcomes(paths.trajectories(f"explore{mark}")) if is_explored(stages, mark) else []
    explored = [one for one in played if not one.unfinished]
    agreement: Any = (read_note(paths.agreement(mark), dict[str, Any]) or {}).get("mean")
    return Iteration(
        number=int(mark[1:] or 1),
        explored=explored,
        unfinished=len(played) - len(explored),
        counts=account_of(notes),
        metrics=read_notes(paths.metrics(f"align{mark}"), Metrics),
        agreement=float(agreement) if is_number(agreement) else None,
        ranking=read_note(paths.ranking(mark), Ranked),
        seconds=seconds_of(stages, mark),
    )


def joined_metrics(iterations: Iterable[Iteration]) -> list[dict[str, Any]]:
    """Join the training entries of all iterations, with step numbers that continue across iterations."""
    found: list[dict[str, Any]] = []
    before = 0.0
    for each in iterations:
        rows = [row | {"step": before + row.get("step", at)} for at, row in enumerate(each.metrics, start=1)]
        found += rows
        before = max((row["step"] for row in rows), default=before)
    return found


def iteration_rows(
    iterations: Sequence[Iteration], policies: Sequence[Mapping[str, Any]], bounded: bool
) -> list[dict[str, Any]]:
    """Return the section `iterations` of `summary.json`.

    Args:
        iterations: Iterations in order.
        policies: Rows of the evaluated policies. The name of a trained policy contains the number of its iteration.
        bounded: Whether the scores of all explored episodes lie between 0 and 1.
    """
    made = {iteration_of(row["name"]) or 1: row for row in policies if row["name"] not in ("base", "sft")}
    return [
        {
            "iteration": each.number,
            "explored": _explored(each.explored, bounded) if each.explored else None,
            "unfinished": each.unfinished,
            "ledger": ledger_of(each.counts, len(each.explored)),
            "training": _training(each),
            "evaluation": _evaluation(made.get(each.number)),
            "seconds": each.seconds,
        }
        for each in iterations
    ]


def _training(each: Iteration) -> dict[str, Any] | None:
    """Return the numbers of an iteration's training; None if no step was logged."""
    if not each.metrics:
        return None
    found = training_of(each.metrics) | {"agreement": each.agreement}
    return found | ({"ranking": each.ranking} if each.ranking else {})


def unbalanced(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a note for each iteration whose bins do not add up to the requested number of units."""
    sums = (
        (row["iteration"], sum(row["ledger"]["bins"].values()), row["ledger"]["asked"], row["ledger"]["unit"])
        for row in rows
        if row["ledger"]
    )
    return [
        f"The bins of iteration {number} hold {held} of the {asked} {unit} asked for. Give its credit again."
        for number, held, asked, unit in sums
        if held != asked
    ]


def not_over(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a note if explored episodes continue in the next iteration."""
    count = sum(row["unfinished"] for row in rows)
    if not count:
        return []
    return [
        f"Episodes were explored in windows: {count} times one went on in the next iteration. Scores, success and "
        "turns of explored episodes are of those that were over in their iteration, and the first to be over are short."
    ]


def unit_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the unit that a run's ledgers count, such as `episodes`; see `ledger_of`."""
    return next((row["ledger"]["unit"] for row in rows if row["ledger"]), "episodes")


def _explored(episodes: Sequence[Outcome], bounded: bool) -> dict[str, Any]:
    """Return means over explored episodes, with intervals clustered by task."""
    tasks = [one.task for one in episodes]
    scores = [one.score for one in episodes]
    success = cluster_interval([float(one.success) for one in episodes], tasks)
    reward = cluster_interval(scores, tasks, bounds=(0.0, 1.0) if bounded else None)
    turns = cluster_interval([float(one.turns) for one in episodes], tasks, bounds=None)
    invalid = _invalid(episodes)
    surprise = [one.surprise for one in episodes if one.surprise is not None]
    policies = dict.fromkeys(one.policy.partition("@")[0] for one in episodes)
    return {
        "policy": ", ".join(filter(None, policies)) or None,
        "n": len(episodes),
        "tasks": len(set(tasks)),
        "mean_score": reward.mean,
        "interval": ends(reward),
        "success_rate": success.mean,
        "success_interval": ends(success),
        "mean_turns": turns.mean,
        "turns_interval": ends(turns),
        "invalid_rate": invalid.mean if invalid else None,
        "invalid_interval": ends(invalid) if invalid else None,
        "surprise": fmean(surprise) if surprise else None,
        "failed": sum(one.failed for one in episodes),
    }


def _invalid(episodes: Sequence[Outcome]) -> Estimate | None:
    """Return the share of invalid turns with an interval clustered by task; None if no turn was played."""
    turns = [(i < one.invalid, one.task) for one in episodes for i in range(one.turns)]
    return cluster_interval([float(bad) for bad, _ in turns], [task for _, task in turns]) if turns else None


def _evaluation(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the score of the policy that an iteration trained; None if that policy was not evaluated."""
    if row is None:
        return None
    keys = ("n", "mean_score", "interval", "success_rate", "success_interval")
    return {"policy": row["name"], **{key: row[key] for key in keys}}


def ends(found: Estimate) -> list[float | None]:
    """Return both ends of an interval, with None for an infinite or undefined end."""
    return [end if math.isfinite(end) else None for end in (found.low, found.high)]
