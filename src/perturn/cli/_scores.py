"""How scores and comparisons look in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from perturn.cli._base import results


def print_summary(summary: Mapping[str, Any]) -> None:
    """The headline table of a run, and its comparison, from `summary.json`."""
    from perturn.report.protocol import protocol_line

    stamp = summary["protocol"] or {}
    table = Table(
        title=f"{stamp.get('name', '')}, held-out tasks", caption=protocol_line(stamp) if stamp else None
    )
    for column in ("policy", "n", "score [95 %]", "success [95 %]", "turns", "failed"):
        table.add_column(column)
    for row in summary["policies"]:
        table.add_row(
            row["name"],
            str(row["n"]),
            f"{row['mean_score']:.3f} {_interval(row['interval'], '.3f')}",
            f"{row['success_rate']:.3f} {_interval(row['success_interval'], '.3f')}",
            f"{row['mean_turns']:.1f}",
            str(row["failed"]),
        )
    results.print(table)
    if summary["comparison"]:
        print_comparison(summary["comparison"])


def print_comparison(found: Mapping[str, Any]) -> None:
    """A paired comparison in one line."""
    mcnemar = found["mcnemar_p_value"]
    exact = "" if mcnemar is None else f" (McNemar's exact test {mcnemar:.3f})"
    results.print(
        f"{found['a']} against {found['b']}, paired over {found['n']} tasks: {found['mean_difference']:+.3f} "
        f"{_interval(found['interval'], '+.3f')}, p = {found['p_value']:.3f}{exact}; "
        f"{found['wins']} better, {found['losses']} worse, {found['ties']} equal",
        markup=False,
        soft_wrap=True,
    )


def _interval(ends: Sequence[float | None], form: str) -> str:
    """An interval; a dash where the data cannot give an end."""
    low, high = ("–" if end is None else format(end, form) for end in ends)
    return f"[{low}, {high}]"
