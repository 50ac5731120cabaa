"""Compute the verdicts of a study: each method's mean, its comparison with the baseline, and its tuning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from perturn.stats import Bounds, crossed_bootstrap, crossed_interval
from perturn.study.cells import point_text
from perturn.study.tables.comparisons import LEVEL, POWER, TWO, compare, ends, families, share_that_differs
from perturn.study.tables.study_records import (
    Bases,
    Episodes,
    RecordedStudy,
    Scores,
    has_one_base,
    read_recorded,
    rows_of,
    seeds_by_base,
    shared,
    table,
)

DIGITS = 8
"""Number of significant digits of the numbers in `summary.json`."""
FEW_SEEDS = 4
"""Number of seeds up to which the page warns of wide intervals. Student's 97.5% quantile is 4.3 for 3 seeds, 3.2 for 4,
and 2.3 for 10."""


def summarize(folder: Path) -> dict[str, Any]:
    """Return the numbers of a study in the format of `summary.json`, which docs/verdicts.md describes.

    An interval end that the data do not determine is None.

    Args:
        folder: Folder of the study. If the study is unfinished, `notes` names the missing parts.

    Raises:
        RunError: If the folder holds no study, or a file of it is malformed.
    """
    return summary_of(read_recorded(folder))


def summary_of(study: RecordedStudy) -> dict[str, Any]:
    """Return the numbers of a study that is in memory; see `summarize`."""
    states = Counter(row["state"] for row in study.cells)
    return {
        "name": study.name,
        "baseline": study.baseline,
        "level": LEVEL,
        "power": POWER,
        "environments": {name: _rounded(_environment(study, name)) for name in study.environments},
        "cells": {state: states[state] for state in ("done", "failed", "to do")},
        "failures": [row for row in study.cells if row["state"] == "failed"],
        "episodes": len(study.episodes),
    }


def _rounded(value: Any) -> Any:
    """Return a value in which each float has `DIGITS` significant digits."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _environment(study: RecordedStudy, name: str) -> dict[str, Any]:
    """Return the numbers of one environment: its methods, their comparisons and their tuning."""
    played = {method: study.played("test", name, method) for method in study.methods(name)}
    measures = _measures([row for rows in played.values() for row in rows])
    methods = [_method(study, name, method, rows, measures) for method, rows in played.items()]
    further: list[dict[str, Any]] = [{"method": one, "other": other} for one, other in study.further]
    primary: list[dict[str, Any]] = [{"method": one, "other": other} for one, other in study.primary]
    for measure, bounds in measures.items():
        tables = {method: table(rows, measure) for method, rows in played.items()}
        found = compare(study, tables, bounds)
        for row in methods:
            row[measure]["against"] = found.get((row["method"], study.baseline))
        for row in (*primary, *further):
            row[measure] = found.get((row["method"], row["other"]))
    seeds = sorted({seed for row in methods for seed in row["seeds"]})
    tuning = [each for method in played for each in _tuning(study, name, method)]
    return {
        "protocol": _protocol(study, name),
        "seeds": seeds,
        "comparisons": {name: len(pairs) for name, pairs in families(study, list(played)).items()},
        "measures": list(measures),
        "methods": methods,
        "primary": primary,
        "further": [row for row in further if (row["method"], row["other"]) not in study.primary],
        "tuning": tuning,
        "notes": [
            *_notes(study, name, methods, seeds),
            *_on_tuning(tuning),
            *_on_ends(tuning),
            *_on_choice(methods, tuning),
            *_on_primary(study),
            *_on_intervals([(row, measure, row[measure]) for measure in measures for row in primary]),
            *_on_seeds(study, name, seeds),
            *_on_weights(study, name),
        ],
    }


def _protocol(study: RecordedStudy, environment: str) -> Mapping[str, Any] | None:
    """Return the conditions of the baseline's scores, or else of the first method that has recorded conditions."""
    found = study.protocols.get(environment, {})
    return found.get(study.baseline) or next(iter(found.values()), None)


def _measures(episodes: Episodes) -> dict[str, Bounds]:
    """Return the compared measures with their bounds: success, and the score if it differs from success."""
    if all(row["score"] == row["success"] for row in episodes):
        return {"success": (0.0, 1.0)}
    within = all(0 <= row["score"] <= 1 for row in episodes)
    return {"success": (0.0, 1.0), "score": (0.0, 1.0) if within else None}


def _method(
    study: RecordedStudy, environment: str, method: str, rows: Episodes, measures: Mapping[str, Bounds]
) -> dict[str, Any]:
    """Return the numbers of a method on the test tasks."""
    successes, bases = table(rows, "success"), study.bases
    seeds, tasks = shared(successes) if rows else ([], [])
    kept = set(tasks)
    cells = [row for row in study.cells if (row["environment"], row["method"]) == (environment, method)]
    tested = [row for row in cells if row["panel"] == "test"]
    spent = [row["seconds"] for row in tested if row["state"] == "done" and row.get("seconds") is not None]
    tuned = [row["seconds"] or 0.0 for row in cells if row["panel"] == "tune" and row.get("seconds")]
    return {
        "method": method,
        "point": next((row["point"] for row in tested if row["state"] == "done"), {}),
        "episodes": len(rows),
        "failed": sum(row.get("failed", False) for row in rows),
        "tasks": len(tasks),
        "seeds": seeds,
        "bases": len(seeds_by_base(seeds, bases)),
        "left_out": sum(row["task"] not in kept for row in rows),
        **{measure: _mean(table(rows, measure), bounds, bases) for measure, bounds in measures.items()},
        "seeds_differ": share_that_differs(successes, seeds, tasks),
        "turns": _mean(table(rows, "turns"), None, bases),
        "invalid": _invalid(rows, bases),
        "seconds": fmean(spent) if spent else None,
        "tuning_seconds": sum(tuned),
    }


def _mean(values: Scores, bounds: Bounds, bases: Bases) -> dict[str, Any]:
    """Return a mean over seeds and tasks with two intervals; all None if no task was played under every seed.

    Seeds with the same base model are averaged first. With two base models there is no interval.
    """
    seeds, tasks = shared(values) if values else ([], [])
    if not tasks:
        return {"mean": None, "by_base": [], "interval": [None, None], "bootstrap": [None, None]}
    rows = rows_of(values, seeds_by_base(seeds, bases), tasks)
    found = crossed_interval(rows, bounds=bounds)
    tested = len(rows) != TWO
    return {
        "mean": found.mean,
        "by_base": [fmean(row) for row in rows],
        "interval": ends(found.low, found.high) if tested else [None, None],
        "bootstrap": list(crossed_bootstrap(rows)) if tested else [None, None],
    }


def _invalid(episodes: Episodes, bases: Bases) -> dict[str, Any]:
    """Return the share r of invalid turns: the mean of r + (invalid - r * turns) / m, with m the mean of `turns`."""
    turns, invalid = table(episodes, "turns"), table(episodes, "invalid")
    mean = fmean([each for tasks in turns.values() for each in tasks.values()] or [0.0])
    if mean == 0:
        return _mean({}, None, bases)
    share = fmean([each for tasks in invalid.values() for each in tasks.values()]) / mean
    found = _mean(
        {
            seed: {task: share + (invalid[seed][task] - share * turns[seed][task]) / mean for task in tasks}
            for seed, tasks in turns.items()
        },
        None,
        bases,
    )
    cut = [None if end is None else min(1.0, max(0.0, end)) for end in found["interval"]]
    return found | {"interval": cut}


def _tuning(study: RecordedStudy, environment: str, method: str) -> Iterator[dict[str, Any]]:
    """Yield the numbers of each point of a method on the tuning tasks."""
    cells = [row for row in study.cells if (row["environment"], row["method"]) == (environment, method)]
    points = {point_text(row["point"]): row["point"] for row in cells}
    chosen = {point_text(row["point"]) for row in cells if row["panel"] == "test" and row["state"] == "done"}
    rows = study.played("tune", environment, method)
    for text in dict.fromkeys(row["point"] for row in rows):
        successes = table([row for row in rows if row["point"] == text], "success")
        seeds, tasks = shared(successes)
        yield {
            "method": method,
            "point": points.get(text, {}),
            "text": text,
            "seeds": seeds,
            "tasks": len(tasks),
            "success": _mean(successes, (0.0, 1.0), study.bases),
            "chosen": text in chosen,
        }


def _notes(
    study: RecordedStudy, environment: str, methods: Sequence[Mapping[str, Any]], seeds: Sequence[int]
) -> Iterator[str]:
    """Yield cautions about the numbers of an environment, one sentence each."""
    waiting = sum(row["state"] == "to do" for row in study.cells if row["environment"] == environment)
    if waiting:
        yield f"{_count(waiting, 'cell')} not done yet. Run the same command again."
    if all(row["method"] != study.baseline or not row["episodes"] for row in methods):
        yield f"The baseline, {study.baseline}, has no episode on the test tasks, so there are no comparisons."
    protocol = _protocol(study, environment) or {}
    for method, stamp in study.protocols.get(environment, {}).items():
        keys = [key for key in protocol.keys() | stamp.keys() if protocol.get(key) != stamp.get(key)]
        if keys:
            yield (
                f"The method {method} was scored under another protocol than {study.baseline}, so a difference may "
                f"come from the protocol. The protocols differ in {', '.join(sorted(keys))}."
            )
    for row in methods:
        name, missing = row["method"], [seed for seed in seeds if seed not in row["seeds"]]
        if missing:
            listed = ", ".join(map(str, missing))
            yield f"{name} has no result for seed {listed}. It is compared on the seeds that both methods have."
        if row["left_out"]:
            left = _count(row["left_out"], "episode")
            yield f"{left} left out for {name}, because not every seed of {name} played these tasks."
    yield from _on_failed(study, environment, methods)


def _on_failed(study: RecordedStudy, environment: str, methods: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a note on failed episodes, which verdicts count as losses."""
    for row in methods:
        if row["failed"]:
            share = f"{row['failed']} of {_number(row['episodes'], 'test episode')}"
            yield f"{row['method']}: {share} failed in the environment or the engine. Each counts as unsolved."
    played = [each for row in methods for each in study.played("test", environment, row["method"])]
    if any("failed" not in each for each in played):
        yield "episodes.parquet does not say which episodes failed. Run the same command again to add this."


def _on_tuning(tuning: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield notes on unequal tuning of the methods, and on tested settings that are not the best."""
    points: dict[str, list[Mapping[str, Any]]] = {}
    for row in tuning:
        if row["text"]:
            points.setdefault(row["method"], []).append(row)
    budgets = {
        method: sum(row["tasks"] * len(row["seeds"]) for row in rows) for method, rows in points.items()
    }
    if len(set(budgets.values())) > 1:
        said = ", ".join(f"{method} {budget}" for method, budget in budgets.items())
        yield f"Tuning is not finished, or methods were tuned on unequal numbers of episodes: {said}."
    for method, rows in points.items():
        best = max(row["success"]["mean"] or 0.0 for row in rows)
        worse = [
            row["text"] for row in rows if row["chosen"] and (row["success"]["mean"] or 0.0) < best - 1e-9
        ]
        if worse:
            yield f"{method} was tested at {worse[0]}, which is not its best setting on the tuning tasks."


def _on_ends(tuning: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a note for each end of a sweep of learning rates, with the methods whose chosen rate is at this end."""
    rates: dict[
        tuple[str, str], list[tuple[float, bool]]
    ] = {}  # (method, setting) -> (rate, whether it was chosen)
    for row in tuning:
        for key, value in row["point"].items():
            if key.rpartition(".")[2] == "learning_rate":
                rates.setdefault((row["method"], key), []).append((float(value), row["chosen"]))
    swept = {swept: found for swept, found in rates.items() if len({rate for rate, _ in found}) > 1}
    for end, side, direction in ((min, "lowest", "lower"), (max, "highest", "higher")):
        chosen = (
            method for (method, _), found in swept.items() if (end(rate for rate, _ in found), True) in found
        )
        names = list(dict.fromkeys(chosen))
        if names:
            yield (
                f"The {side} of the learning rates tried was chosen for {', '.join(names)}. The best rate may be "
                f"{direction}."
            )


def _on_choice(methods: Sequence[Mapping[str, Any]], tuning: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a note on methods whose point was chosen with policies that are tested too, which favours lucky points."""
    alike: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for row in methods:
        points = [each for each in tuning if each["method"] == row["method"]]
        both = tuple(sorted({seed for each in points for seed in each["seeds"]} & set(row["seeds"])))
        if len(points) > 1 and both:
            alike.setdefault((len(points), both), []).append(row["method"])
    for (count, both), names in alike.items():
        one = f"seed {both[0]}, which is also a test seed"
        seeds = one if len(both) == 1 else f"seeds {', '.join(map(str, both))}, which are also test seeds"
        yield (
            f"The best of {count} settings was chosen on {seeds}. This can favor these methods by a few points: "
            f"{', '.join(names)}."
        )


def _on_primary(study: RecordedStudy) -> Iterator[str]:
    """Yield a note if the primary comparisons were chosen after results were known."""
    if study.primary and study.settings.get("primary_after_results"):
        yield (
            "The primary comparisons were named after the results were known, so their p-values are exploratory: "
            "they confirm nothing."
        )


def _on_intervals(
    primary: Sequence[tuple[Mapping[str, Any], str, Mapping[str, Any] | None]],
) -> Iterator[str]:
    """Yield a note on each primary comparison that differs by Holm's test, and whose interval contains zero."""
    several = len({measure for _, measure, _ in primary}) > 1
    for row, measure, found in primary:
        low, high = found["family_interval"] if found else (None, None)
        if (
            found
            and found["verdict"] in ("better", "worse")
            and (low is None or low <= 0)
            and (high is None or high >= 0)
        ):
            of = f" in {measure}" if several else ""
            family = sum(own == measure for _, own, _ in primary)
            why = (
                "Intervals within the bounds of the score extend further than the test."
                if found["p_value"] * family < LEVEL
                else "Holm's test finds more than these intervals, which hold all at once."
            )
            yield (
                f"{row['method']} against {row['other']} differs{of} by Holm's test, and its interval "
                f"contains zero. {why}"
            )


def _on_seeds(study: RecordedStudy, environment: str, seeds: Sequence[int]) -> Iterator[str]:
    """Yield notes on a small number of seeds, and on a base model that seeds share."""
    count, own, what = len(seeds), len(seeds_by_base(seeds, study.bases)), "seed"
    if own < count:
        what = "base"
        yield f"{count} seeds share {_number(own, 'base')}. The seeds of one base are averaged and count as one."
    elif count > 1 and has_one_base(
        study.settings, [row for row in study.cells if row["environment"] == environment]
    ):
        yield (
            "All seeds start from one base, so every interval and verdict holds for this base only. Another base may "
            "rank the methods differently. Set by_seed: {base.seed: [0, 1, 2]} to train several bases."
        )
    if own == 1:
        yield f"There is one {what}, so the intervals are for other tasks only, and not for another {what}."
    elif own == TWO:
        yield (
            f"Two {what}s give no interval and no p-value, so each {what} has its own difference. 5 to 10 {what}s "
            "give both."
        )
    elif TWO < own <= FEW_SEEDS:
        yield (
            f"{own} {what}s are few, so intervals are wide where {what}s differ. 5 to 10 {what}s give narrower "
            "intervals."
        )


def _on_weights(study: RecordedStudy, environment: str) -> Iterator[str]:
    """Yield a note for each stage that was trained twice with unequal weights, although cells share it.

    This happens if the runs of a study are removed, and a cell that is added later trains the stage on another machine.
    """
    trained: dict[str, dict[str, dict[str, None]]] = {}  # stage -> digest -> cells
    for row in study.cells:
        if (row["environment"], row["panel"], row["state"]) == (environment, "test", "done"):
            for stage, digest in row.get("weights", {}).items():
                cells = trained.setdefault(stage, {}).setdefault(digest, {})
                cells[f"{row['method']} seed {row['seed']}"] = None
    for stage, groups in trained.items():
        if len(groups) > 1:
            listed = " and ".join(f"({', '.join(cells)})" for cells in groups.values())
            yield (
                f"The stage {stage.rpartition('-')[0]} was trained more than once, with other weights each time, so a "
                f"difference between these groups may come from it: {listed}."
            )


def _count(number: int, noun: str) -> str:
    return f"{_number(number, noun)} {'is' if number == 1 else 'are'}"


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
