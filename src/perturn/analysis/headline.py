"""The headline of a run: the scores of the policies that it began, went on and ended with, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perturn.analysis.number_text import interval, number


def headline(summary: Mapping[str, Any]) -> str | None:
    """Return the line of scores from the first policy to the last; None where fewer than two were scored.

    A run of one iteration shows base, SFT and the aligned policy. A run of several shows the policy that the loop
    started from and the last one.

    Args:
        summary: As `summary.json` has it.
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
        f"{label} {number(row['mean_score'])} [{interval(row['interval'])}]{'' if alike else _n(row)}"
        for label, row in zip(labels, (rows[name] for name in shown), strict=True)
    ]
    end = f"; n = {rows[start]['n']}, 95\u00a0% intervals." if alike else "; 95\u00a0% intervals."
    return f"Average score: {' → '.join(scores)}{end}"


def _n(row: Mapping[str, Any]) -> str:
    return f" (n = {row['n']})"
