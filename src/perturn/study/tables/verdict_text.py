"""Wording of a study's verdicts. A missing difference is never reported as proof of equality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WORDS = {
    "better": "better",
    "worse": "worse",
    "these seeds": "not shown for other seeds",
    "unseen": "no difference seen",
}
"""Text of each verdict in a table."""


def verdict(row: Mapping[str, Any], level: float) -> str:
    """Return the verdict of a comparison, a key of `WORDS`.

    Args:
        row: A comparison with corrected p-values.
        level: Significance level of the test.
    """
    low, high = row["interval"]
    if len(row["seeds_by_base"]) > 1 and row["corrected"] is not None and row["corrected"] < level:
        if low is not None and low > 0:
            return "better"
        if high is not None and high < 0:
            return "worse"
    return "these seeds" if row["corrected_of_tasks"] < level else "unseen"


def sentences(method: str, row: Mapping[str, Any], measure: str = "success") -> tuple[str, str]:
    """Return two sentences on a comparison: its verdict and its evidence.

    Args:
        method: Name of the method.
        row: Comparison of the method, with its verdict.
        measure: `success`, whose differences are given in points, or `score`.
    """
    return _verdict(method, row, measure), _evidence(row, measure)


def points(value: float | None, measure: str = "success") -> str:
    """Return a difference with its sign. Differences of success are in points, which are hundredths."""
    if value is None:
        return "?"
    return f"{100 * value:+.1f}" if measure == "success" else f"{value:+.3f}"


def interval_of(row: Mapping[str, Any]) -> Sequence[float | None]:
    """Return the interval of a comparison. A primary comparison has the interval that holds for its family."""
    found: Sequence[float | None] = row["family_interval" if row["family"] == "primary" else "interval"]
    return found


def p_value(value: float | None) -> str:
    """Return a p-value or q-value as text; a dash if it is None."""
    if value is None:
        return "–"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _verdict(method: str, row: Mapping[str, Any], measure: str) -> str:
    baseline = row["baseline"]
    if row["verdict"] in ("better", "worse"):
        return f"{method} is {row['verdict']} than {baseline}."
    if row["verdict"] == "these seeds":
        side, count = "better" if row["mean_difference"] > 0 else "worse", len(row["seeds"])
        these = "this one seed" if count == 1 else f"these {count} seeds"
        return f"{method} is {side} than {baseline} for {these}. This is not shown for other seeds."
    return f"No difference between {method} and {baseline} was seen{_limit(row, measure)}."


def _limit(row: Mapping[str, Any], measure: str) -> str:
    """Return the size of a difference that would have been detected, as text."""
    size, most = row["smallest_difference"], 1.0
    if not row["differs"]:
        return ": all of their episodes have equal results"
    if size is None:
        return "; with so few seeds or tasks, the size of a detectable difference is unknown"
    if measure == "success" and size > most:
        return "; with so few seeds, no difference could be detected, however large"
    unit = f"{100 * size:.1f} points" if measure == "success" else f"{size:.3f}"
    return f"; this study detects a true difference of {unit} in four of five cases"


def _evidence(row: Mapping[str, Any], measure: str) -> str:
    unit = " points" if measure == "success" else ""
    seeds = "1 seed" if len(row["seeds"]) == 1 else f"{len(row['seeds'])} seeds"
    if len(row["seeds_by_base"]) < len(row["seeds"]):
        seeds += " of 1 base" if len(row["seeds_by_base"]) == 1 else f" of {len(row['seeds_by_base'])} bases"
    tasks = "1 task" if row["tasks"] == 1 else f"{row['tasks']} tasks"
    return (
        f"Difference {points(row['mean_difference'], measure)}{unit} ({_certainty(row, measure)}; "
        f"{seeds} \u00d7 {tasks}, of which {100 * row['differs']:.1f}\u00a0% differ)."
    )


def _certainty(row: Mapping[str, Any], measure: str) -> str:
    """Return the interval and the p-value as text. Two base models have two differences instead."""
    if row["p_value"] is None:
        return " and ".join(points(each, measure) for each in row["by_base"]) + ", too few for an interval"
    low, high = (points(end, measure) for end in interval_of(row))
    if row["family"] == "primary":
        return f"interval of the primary comparisons [{low}, {high}]; p {p_value(row['corrected'])} by Holm"
    q = f", q {p_value(row['corrected'])}" if row["family"] else ""
    return f"95\u00a0% interval [{low}, {high}]; p {p_value(row['p_value'])}{q}"
