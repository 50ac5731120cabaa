"""Draw the iterations of a run: its learning curve, small curves of single values, and the bins of its episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from perturn.data.iteration_numbers import is_number
from perturn.report.figures.base import (
    GREY,
    OTHERS,
    SIDES,
    lay_out,
    number_turns,
    plain,
    reach,
    run_line,
)

Rows = Sequence[Mapping[str, Any]]
"""The section `iterations` of a run's summary."""

BINS = {
    "trained": SIDES["chosen"], "kept": SIDES["chosen"], "no_spread": "#98a1ab", "tie": "#98a1ab",
    "cut": OTHERS[2], "filtered": OTHERS[0], "gap": OTHERS[0], "failed": SIDES["rejected"], "identical": OTHERS[1],
    "stale": "#b58900", "alone": OTHERS[2], "over": "#5fa8d3", "no_turns": "#6b4f3a", "no_expert": OTHERS[2],
    "better_than_expert": "#5fa8d3", "success": SIDES["chosen"], "failure": OTHERS[2], "repeated": OTHERS[1],
    "too_long": "#b58900", "not_corrected": OTHERS[2],
}  # fmt: skip
"""Colour of each bin of the ledger."""
_FADED = 0.18
"""Opacity of the band of an interval."""
_MARKED = 30
"""Number of points of a line up to which each point has a marker."""


@dataclass(frozen=True)
class Line:
    """A value of each iteration, drawn as one line."""

    part: str
    """Object of the iteration that holds the value: `explored` or `training`."""
    key: str
    interval: str | None = None
    name: str = ""


@dataclass(frozen=True)
class Curve:
    """Values to draw together in one figure."""

    title: str
    lines: tuple[Line, ...]
    caption: str = ""
    is_share: bool = False


def learning_curve(summaries: Mapping[str, Mapping[str, Any]], key: str, interval: str) -> go.Figure | None:
    """Draw a score of explored and evaluated episodes, with intervals, against the number of earlier iterations.

    Args:
        summaries: Summaries by the run's name.
        key: Key of the score: `success_rate` or `mean_score`.
        interval: Key of the score's interval.

    Returns:
        The figure; None if no run has two iterations.
    """
    figure = go.Figure()
    shown = {name: row for name, row in summaries.items() if len(row["iterations"]) > 1}
    for index, (name, summary) in enumerate(shown.items()):
        style = run_line(index)
        of = "" if len(summaries) == 1 else f"{plain(name)}, "
        played = [row for row in summary["iterations"] if row["explored"]]
        points = [(row["iteration"] - 1, row["explored"]) for row in played]
        _add_line(figure, [(x, row[key], row[interval]) for x, row in points], f"{of}explored", style)
        figure.data[-1].customdata = [
            [row["n"], row["tasks"], plain(row["policy"] or "")] for _, row in points
        ]
        figure.data[
            -1
        ].hovertemplate = "%{customdata[2]} %{y:.3f}, %{customdata[0]} episodes of %{customdata[1]} tasks"
        _add_scores(figure, _scores(summary), key, interval, f"{of}evaluated", style)
    if not figure.data:
        return None
    lay_out(figure, "iterations trained before", height=340, hovermode="closest", showlegend=True)
    if key == "success_rate":
        figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    return figure


def _scores(summary: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the evaluated policies, each with the number of iterations that trained it."""
    first = {row["name"]: row for row in summary["policies"] if row["name"] in ("base", "sft")}
    start = first.get("sft") or first.get("base")
    made = [
        (row["iteration"], row["evaluation"] | {"name": row["evaluation"]["policy"]})
        for row in summary["iterations"]
        if row["evaluation"]
    ]
    return [*([(0, start)] if start else []), *made]


def _add_scores(
    figure: go.Figure,
    scores: Sequence[tuple[int, Mapping[str, Any]]],
    key: str,
    interval: str,
    name: str,
    style: Mapping[str, str],
) -> None:
    """Add points with error bars to a figure."""
    if not scores:
        return
    color = OTHERS[0] if style == run_line(0) else style["color"]
    means = [row[key] for _, row in scores]
    figure.add_scatter(
        name=name,
        x=[x for x, _ in scores],
        y=means,
        error_y=reach(means, [row[interval] for _, row in scores]) | {"thickness": 1.6},
        customdata=[[plain(row["name"]), row["n"]] for _, row in scores],
        mode="markers",
        marker={
            "size": 10,
            "symbol": "diamond" if style["dash"] == "solid" else "diamond-open",
            "color": color,
        },
        hovertemplate="%{customdata[0]} %{y:.3f}, %{customdata[1]} episodes",
    )


def iteration_curve(runs: Mapping[str, Rows], curve: Curve) -> go.Figure | None:
    """Draw a value by iteration for several runs; None if no run has the value at two or more iterations.

    Args:
        runs: Iterations of each run, by the run's name.
        curve: The values to draw.
    """
    figure = go.Figure()
    for line in curve.lines:
        for index, (name, rows) in enumerate(runs.items()):
            points = [
                (
                    row["iteration"],
                    row[line.part][line.key],
                    row[line.part][line.interval] if line.interval else None,
                )
                for row in rows
                if row[line.part] and is_number(row[line.part][line.key])
            ]
            if len(points) < 2:
                continue
            label = ", ".join(filter(None, (name if len(runs) > 1 else "", line.name)))
            number = curve.lines.index(line)
            style = run_line(index, "dot" if number else "solid") if len(runs) > 1 else run_line(number)
            _add_line(figure, points, plain(label), style)
    if not figure.data:
        return None
    named = [trace for trace in figure.data if trace.showlegend is not False]
    lay_out(
        figure, "iteration", height=220, hovermode="x unified", showlegend=len(named) + len(curve.lines) > 2
    )
    if not figure.layout.showlegend:
        figure.update_layout(margin_t=10)
    shown = [value for trace in figure.data for value in trace.y if value is not None]
    if min(shown) == max(shown) == 0:
        figure.update_yaxes(range=[-0.05, 1])
    figure.update_yaxes(
        **({"tickformat": ".0%", "rangemode": "tozero"} if curve.is_share else {"exponentformat": "power"})
    )
    return figure


def ledger_bars(rows: Rows) -> go.Figure | None:
    """Draw the bins of episodes or memberships in each iteration as stacked bars; None if nothing was counted."""
    counted = [row for row in rows if row["ledger"]]
    if not counted:
        return None
    names = dict.fromkeys(name for row in counted for name in row["ledger"]["bins"])
    figure = go.Figure()
    for name in sorted(names, key=lambda each: list(BINS).index(each) if each in BINS else len(BINS)):
        values = [row["ledger"]["bins"].get(name, 0) for row in counted]
        if any(values):
            figure.add_bar(
                name=plain(name.replace("_", " ")),
                x=[row["iteration"] for row in counted],
                y=values,
                marker={"color": BINS.get(name, GREY), "line": {"width": 0}},
                hovertemplate="%{y}",
            )
    lay_out(
        figure,
        "iteration",
        counted[0]["ledger"]["unit"],
        height=300,
        barmode="stack",
        bargap=0.15,
        hovermode="x unified",
    )
    figure.update_layout(showlegend=True)
    return number_turns(figure, max(row["iteration"] for row in counted), most=12)


def _add_line(
    figure: go.Figure,
    points: Sequence[tuple[float, float, Sequence[float | None] | None]],
    name: str,
    style: Mapping[str, str],
) -> None:
    """Add a line, with a band where points have intervals."""
    x = [at for at, _, _ in points]
    ends = [interval for _, _, interval in points if interval and None not in interval]
    if ends and len(ends) == len(points):
        figure.add_scatter(
            x=x + x[::-1],
            y=[high for _, high in ends] + [low for low, _ in ends][::-1],
            mode="lines",
            fill="toself",
            fillcolor=style["color"],
            opacity=_FADED,
            line_width=0,
            hoverinfo="skip",
            showlegend=False,
        )
    figure.add_scatter(
        name=name,
        x=x,
        y=[value for _, value, _ in points],
        mode="lines+markers" if len(points) <= _MARKED else "lines",
        marker_size=5,
        line={**style, "width": 1.8},
        hovertemplate="%{y:.4g}",
    )
