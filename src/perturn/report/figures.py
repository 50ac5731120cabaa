"""The report's plotly figures: plain data in, a figure out. Colours of text and grid come with the theme."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

CHOSEN, REJECTED = "#3b82c4", "#cf5c36"
POLICIES = {"base": "#98a1ab", "sft": "#5fa8d3"}
OTHERS = ["#e0982c", "#6a9f58", "#a06cb0", "#cf5c36"]
MOST_POINTS = 2000
"""Points of one curve; more cannot be told apart on a screen."""


@dataclass(frozen=True)
class Chart:
    """Logged values that are drawn in one figure."""

    title: str
    keys: tuple[str, ...]
    caption: str = ""
    log: bool = False
    """Whether the axis is logarithmic where the values span more than a factor of 100."""


def theme(text: str, grid: str) -> dict[str, Any]:
    """A plotly template of one text colour and one grid colour on whatever the page has behind it."""
    axis = {
        "gridcolor": grid,
        "linecolor": grid,
        "zerolinecolor": grid,
        "automargin": True,
        "title.standoff": 8,
    }
    layout = go.Layout(
        font={"color": text, "family": "system-ui, sans-serif", "size": 12},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        xaxis=axis,
        yaxis=axis,
        hoverlabel={"font": {"family": "system-ui, sans-serif", "size": 12}},
    )
    return {"layout": layout.to_plotly_json()}


def score_by_kind(
    by_kind: Mapping[str, Mapping[str, Mapping[str, Any]]], policies: Sequence[str]
) -> go.Figure:
    """Average score of each policy on each kind of task: grouped bars with their intervals."""
    figure = go.Figure()
    colors = policy_colors(policies)
    for policy in policies:
        cells = {kind: row[policy] for kind, row in by_kind.items() if policy in row}
        means = [cell["mean_score"] for cell in cells.values()]
        ends = [cell["interval"] for cell in cells.values()]
        figure.add_bar(
            name=plain(policy),
            orientation="h",
            x=means,
            y=[label_of_kind(kind) for kind in cells],
            customdata=[[cell["n"]] for cell in cells.values()],
            hovertemplate="%{x:.3f}, n = %{customdata[0]}",
            marker_color=colors[policy],
            error_x={
                "array": [_reach(end[1], mean) for end, mean in zip(ends, means, strict=True)],
                "arrayminus": [_reach(mean, end[0]) for end, mean in zip(ends, means, strict=True)],
                "color": "#7a828c",
                "thickness": 1.6,
                "width": 3,
            },
        )
    height = 90 + len(by_kind) * (14 + 15 * len(policies))
    lay_out(figure, height=max(220, height), x="average score", y="")
    figure.update_yaxes(type="category", autorange="reversed")
    figure.update_layout(barmode="group", bargap=0.25)
    return figure


def metric_lines(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], chart: Chart, *, height: int = 240
) -> go.Figure | None:
    """Logged values over optimizer steps; None if none of them was logged.

    Args:
        runs: Rows of each run's metrics file, by the run's name.
        chart: Which values.
        height: Of the figure, in pixels.
    """
    figure = go.Figure()
    shown: list[float] = []
    for index, (run, key) in enumerate((run, key) for key in chart.keys for run in runs):
        points = _points(runs[run], key)
        if points:
            shown += [value for _, value in points]
            _add_line(
                figure, points, _line_name(run, key, chart, len(runs)), _line_style(run, key, runs, index)
            )
    if not shown:
        return None
    lay_out(figure, height=height, x="optimizer step", y="")
    figure.update_yaxes(exponentformat="power", showexponent="all", minexponent=2)
    figure.update_layout(hovermode="x unified", showlegend=len(figure.data) > 1)
    if len(figure.data) == 1:
        figure.update_layout(margin_t=10)
    if chart.log and min(shown) > 0 and max(shown) / min(shown) > 100:
        figure.update_yaxes(type="log", dtick=_decades(min(shown), max(shown)))
    if min(shown) == max(shown) == 0:
        figure.update_yaxes(range=[0, 1])
    return figure


def _points(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """(step, value) of the rows that have the value; long curves are thinned to what a screen can show."""
    points = [
        (row.get("step", position), row[key]) for position, row in enumerate(rows) if is_number(row.get(key))
    ]
    every = -(-len(points) // MOST_POINTS)
    return points if every <= 1 else [*points[:-1:every], points[-1]]


def _add_line(figure: go.Figure, points: Sequence[tuple[float, float]], name: str, line: Any) -> None:
    figure.add_scatter(
        name=plain(name),
        x=[step for step, _ in points],
        y=[value for _, value in points],
        mode="lines+markers" if len(points) < 30 else "lines",
        marker_size=5,
        line=line,
        hovertemplate="%{y:.4g}",
    )


def _line_name(run: str, key: str, chart: Chart, runs: int) -> str:
    name = key.rsplit("/", 1)[-1].replace("_", " ")
    if runs == 1:
        return name
    return run if len(chart.keys) == 1 else f"{run}, {name}"


def _line_style(run: str, key: str, runs: Mapping[str, Any], index: int) -> dict[str, Any]:
    """One run: a colour a value. Several: a colour a run, and dashes for the rejected side."""
    name = key.rsplit("/", 1)[-1]
    if len(runs) == 1:
        return {"color": _line_color(name, index), "width": 1.8}
    color = [CHOSEN, *OTHERS][list(runs).index(run) % 5]
    return {"color": color, "width": 1.8, "dash": "dot" if name == "rejected" else "solid"}


def label_of_kind(kind: str) -> str:
    """A task kind as an axis shows it."""
    return plain(kind) or "(no kind)"


def is_number(value: Any) -> bool:
    """Whether a logged value can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def plain(text: str) -> str:
    """Text that plotly shows as it is, though it reads some elements in labels."""
    return html.escape(text, quote=False)


def lay_out(figure: go.Figure, *, height: int, x: str, y: str) -> None:
    """Size, margins, axis titles and legend that all figures have in common."""
    figure.update_layout(
        template=None,
        height=height,
        margin={"l": 8, "r": 12, "t": 34, "b": 8},
        xaxis_title=x,
        yaxis_title=y or None,
        dragmode=False,
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "title": None},
    )


def policy_colors(policies: Sequence[str]) -> dict[str, str]:
    """A colour for each policy; base and sft keep theirs."""
    aligned = [policy for policy in policies if policy not in POLICIES]
    return POLICIES | {policy: OTHERS[index % len(OTHERS)] for index, policy in enumerate(aligned)}


def _reach(outer: float | None, inner: float | None) -> float:
    """Length of an error bar; 0 where there is no interval."""
    return 0.0 if outer is None or inner is None else max(0.0, outer - inner)


def _line_color(name: str, index: int) -> str:
    known = {"chosen": CHOSEN, "rejected": REJECTED, "margins": "#6a9f58"}
    return known.get(name, [CHOSEN, *OTHERS[::-1]][index % 5])


def _decades(low: float, high: float) -> int:
    return max(1, round((math.log10(high) - math.log10(low)) / 5))
