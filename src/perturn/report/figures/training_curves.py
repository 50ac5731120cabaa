"""Draw logged values over optimizer steps."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from perturn.data.iteration_numbers import is_number
from perturn.report.figures.base import (
    LINES,
    OTHERS,
    SIDES,
    lay_out,
    plain,
    run_line,
)

MOST_POINTS = 2000
"""Maximum number of points of a curve. More points cannot be distinguished on a screen."""


@dataclass(frozen=True)
class Chart:
    """Logged values to draw together in one figure."""

    title: str
    keys: tuple[str, ...]
    caption: str = ""
    log: bool = False
    """Whether the axis is logarithmic if the values span more than a factor of 100."""


def metric_lines(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], chart: Chart, *, height: int = 240
) -> go.Figure | str | None:
    """Draw logged values over optimizer steps; a sentence for a single step, None if nothing was logged.

    Args:
        runs: Rows of each run's metrics file, by the run's name.
        chart: The values to draw.
        height: Height of the figure, in pixels.
    """
    figure = go.Figure()
    for index, (run, key) in enumerate((run, key) for key in chart.keys for run in runs):
        if points := _points(runs[run], key):
            figure.add_scatter(
                name=plain(_line_name(run, key, chart, len(runs))),
                x=[step for step, _ in points],
                y=[value for _, value in points],
                mode="lines+markers" if len(points) < 30 else "lines",
                marker_size=5,
                line=_line_style(run, key, runs, index),
                hovertemplate="%{y:.4g}",
            )
    if not figure.data:
        return None
    several = len(figure.data) > 1
    steps = {step for trace in figure.data for step in trace.x}
    if len(steps) == 1:
        values = ((html.unescape(trace.name), f"{trace.y[0]:.4g}") for trace in figure.data)
        said = ", ".join(f"{name} {value}" if several else value for name, value in values)
        return f"One optimizer step: {said}. {chart.caption}".rstrip()
    lay_out(figure, "optimizer step", height=height, hovermode="x unified", showlegend=several)
    figure.update_yaxes(exponentformat="power", showexponent="all", minexponent=2)
    if max(steps) - min(steps) < 10:
        figure.update_xaxes(dtick=1)
    if not several:
        figure.update_layout(margin_t=10)
    shown = [value for trace in figure.data for value in trace.y]
    low, high = min(shown), max(shown)
    if chart.log and low > 0 and high / low > 100:
        figure.update_yaxes(type="log", dtick=max(1, round((math.log10(high) - math.log10(low)) / 5)))
    if low == high == 0:
        figure.update_yaxes(range=[-0.05, 1])
    return figure


def _points(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """Return (step, value) of the rows that have the value, thinned to at most about `MOST_POINTS` points."""
    points = [
        (row.get("step", position), row[key]) for position, row in enumerate(rows) if is_number(row.get(key))
    ]
    every = -(-len(points) // MOST_POINTS)
    return points if every <= 1 else [*points[:-1:every], points[-1]]


def _line_name(run: str, key: str, chart: Chart, runs: int) -> str:
    name = key.rsplit("/", 1)[-1].replace("_", " ")
    if runs == 1:
        return name
    return run if len(chart.keys) == 1 else f"{run}, {name}"


def _line_style(run: str, key: str, runs: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the style of a line. A single run has a colour for each value; several runs have a colour for each run."""
    name = key.rsplit("/", 1)[-1]
    if len(runs) == 1:
        known = SIDES | {"margins": OTHERS[1]}
        return {"color": known.get(name, [LINES[0], *OTHERS[::-1]][index % 5]), "width": 1.8}
    dash = "dot" if name == "rejected" else "solid"
    return run_line(list(runs).index(run), dash) | {"width": 1.8}
