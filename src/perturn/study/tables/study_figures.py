"""Draw the figures of a study's page: differences from the baseline, and success by swept setting and by length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from perturn.data.iteration_numbers import is_number
from perturn.report.figures import success_by_length
from perturn.report.figures.base import DOTTED, GREY, lay_out, plain, reach
from perturn.study.tables.study_records import BASE
from perturn.study.tables.verdict_text import interval_of

COLORS = (
    "#3b82c4", "#e0982c", "#6a9f58", "#a06cb0", "#cf5c36", "#2a9d8f", "#8d6e63", "#d1638f", "#5c6bc0", "#9e9d24",
)  # fmt: skip
"""Colours of the methods other than the baseline. Beyond ten methods, colours repeat with another marker."""
_MARKS = ("circle", "square", "triangle-up")
_OF_A_MEAN = {"color": GREY}
_FACTOR = 5
"""Ratio of the largest to the smallest swept number above which the axis is logarithmic."""


def styles(methods: Sequence[str], baseline: str) -> dict[str, dict[str, str]]:
    """Return the colour and the marker of each method, which all figures share."""
    others = [method for method in methods if method != baseline]
    found = {
        method: {"color": COLORS[i % len(COLORS)], "symbol": _MARKS[i // len(COLORS) % len(_MARKS)]}
        for i, method in enumerate(others)
    }
    return {baseline: {"color": GREY, "symbol": "circle"}} | found


def _end(end: float | None, scale: int) -> str:
    """Return the end of an interval as text; a question mark if it is infinite."""
    return "?" if end is None else f"{scale * end:+.3g}"


def differences(
    comparisons: Sequence[Mapping[str, Any]], measure: str, style: Mapping[str, Any]
) -> go.Figure | None:
    """Draw the difference of each comparison with its interval, and of each seed; None if nothing is compared.

    The model before training is left out, since its large difference would compress all others.

    Args:
        comparisons: Rows with `name`, `method`, and a comparison for each measure.
        measure: `success`, whose differences are drawn in points (hundredths), or `score`.
        style: Colour and marker of each method.
    """
    shown = [each for each in comparisons if each[measure] and each[measure]["family"]]
    if not shown:
        return None
    rows = {each["name"]: each[measure] for each in shown}
    scale = 100 if measure == "success" else 1
    means = [scale * row["mean_difference"] for row in rows.values()]
    ends = [[None if end is None else scale * end for end in interval_of(row)] for row in rows.values()]
    seeds = [(plain(name), each) for name, row in rows.items() for each in row["by_seed"]]
    figure = go.Figure()
    figure.add_vline(x=0, line=DOTTED)
    figure.add_scatter(
        name="a seed",
        x=[scale * each["mean_difference"] for _, each in seeds],
        y=[name for name, _ in seeds],
        customdata=[[each["seed"], *(_end(end, scale) for end in each["interval"])] for _, each in seeds],
        mode="markers",
        marker={"size": 8, "symbol": "line-ns-open", "color": GREY},
        hovertemplate="seed %{customdata[0]}: %{x:+.3g} "
        "[%{customdata[1]}, %{customdata[2]}] over tasks<extra></extra>",
    )
    figure.add_scatter(
        name="all seeds, with interval",
        x=means,
        y=[plain(name) for name in rows],
        error_x=reach(means, ends) | {"thickness": 1.8, "color": GREY},
        mode="markers",
        marker={
            "size": 11,
            "symbol": "diamond",
            "color": [style.get(each["method"], _OF_A_MEAN)["color"] for each in shown],
        },
        hovertemplate="%{y}: %{x:+.3g}<extra></extra>",
    )
    title = "points of success" if measure == "success" else "score"
    lay_out(figure, f"difference in {title}", height=130 + 34 * len(rows), hovermode="closest")
    return figure.update_yaxes(type="category", autorange="reversed").update_xaxes(zeroline=False)


def swept_keys(tuning: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings that occur in any point of a sweep."""
    return list(dict.fromkeys(key for row in tuning for key in row["point"]))


def tuning_curve(
    tuning: Sequence[Mapping[str, Any]], key: str, style: Mapping[str, Mapping[str, str]]
) -> go.Figure | None:
    """Draw success on the tuning tasks against a swept setting, with a line for each method.

    A method without any swept settings is drawn as a dotted line.

    Args:
        tuning: Rows of points, as in the summary.
        key: Dotted key of the setting.
        style: Colour and marker of each method.

    Returns:
        The figure; None if no point names the setting.
    """
    lines: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in tuning:
        if key in row["point"] and row["success"]["mean"] is not None:
            others = ", ".join(
                f"{name.rpartition('.')[2]} {value}" for name, value in row["point"].items() if name != key
            )
            lines.setdefault((row["method"], others), []).append(row)
    if not lines:
        return None
    values = [row["point"][key] for rows in lines.values() for row in rows]
    numbers = all(is_number(value) for value in values)
    figure = go.Figure()
    for (method, others), rows in lines.items():
        ordered = sorted(rows, key=lambda row: row["point"][key]) if numbers else rows
        _add_points(figure, ", ".join(filter(None, (method, others))), ordered, key, style[method], numbers)
    for row in tuning:
        if not row["point"] and row["method"] != BASE and row["success"]["mean"] is not None:
            figure.add_hline(
                y=row["success"]["mean"],
                line=DOTTED,
                annotation={"text": plain(row["method"]), "font_color": GREY},
            )
    lay_out(figure, plain(key), "success, tuning tasks", height=340, hovermode="closest", showlegend=True)
    if numbers and min(values) > 0 and max(values) > _FACTOR * min(values):
        ticks = sorted(set(values))
        figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{value:g}" for value in ticks])
    return figure.update_yaxes(tickformat=".0%")


def _add_points(
    figure: go.Figure,
    name: str,
    rows: Sequence[Mapping[str, Any]],
    key: str,
    style: Mapping[str, str],
    numbers: bool,
) -> None:
    """Add the line of a method, with a large marker at the chosen point."""
    means = [row["success"]["mean"] for row in rows]
    figure.add_scatter(
        name=plain(name),
        x=[row["point"][key] if numbers else str(row["point"][key]) for row in rows],
        y=means,
        error_y=reach(means, [row["success"]["interval"] for row in rows]) | {"thickness": 1.1},
        customdata=[[len(row["seeds"]), row["tasks"], ", chosen" if row["chosen"] else ""] for row in rows],
        mode="lines+markers",
        line={"color": style["color"], "width": 1.4},
        marker={"symbol": style["symbol"], "size": [13 if row["chosen"] else 7 for row in rows]},
        hovertemplate="%{x}: %{y:.1%}, %{customdata[0]} seeds × %{customdata[1]} tasks%{customdata[2]}",
    )


def lengths(
    played: Mapping[str, Sequence[Mapping[str, Any]]], style: Mapping[str, Mapping[str, str]]
) -> go.Figure | str | None:
    """Draw the success of test episodes by their number of turns, with a line for each method."""
    figure = success_by_length(
        {
            method: [(row["turns"], row["success"], row["task"]) for row in rows]
            for method, rows in played.items()
            if rows
        }
    )
    if isinstance(figure, go.Figure):
        for trace, method in zip(figure.data, (name for name, rows in played.items() if rows), strict=True):
            trace.update(line_color=style[method]["color"], marker_symbol=style[method]["symbol"])
    return figure
