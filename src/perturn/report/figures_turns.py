"""The figures of turns: confidence and weight by place, their spread, length against success, task by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from perturn.report.figures import CHOSEN, REJECTED, is_number, lay_out, plain, policy_colors
from perturn.stats import Estimate, cluster_interval, rate_interval

LOW_WEIGHT, HIGH_WEIGHT = "#9fb0c0", "#e0982c"
_FADED = {CHOSEN: "rgba(59, 130, 196, 0.18)", REJECTED: "rgba(207, 92, 54, 0.18)"}
_GREY = "#7a828c"
_LENGTHS = 5
"""Groups of lengths that success is given for, at most."""
_TASKS = 400
"""Tasks whose differences are drawn one by one; of more, every so-manieth."""


def confidence_bars(side: Mapping[str, Any], actions: Sequence[str], pivot: float | None) -> go.Figure:
    """Confidence of each turn of one episode, coloured by the weight the turn is given.

    Args:
        side: One side of a row of `metrics/confidence.jsonl`.
        actions: Text of each turn.
        pivot: Where to draw a dotted line.
    """
    confidence, weight = side["confidence"], [round(value, 6) for value in side["weight"]]
    numbers = side.get("turn") or list(range(len(confidence)))
    figure = go.Figure()
    levels = sorted(set(weight))
    for level in levels:
        turns = [index for index, value in enumerate(weight) if value == level]
        figure.add_bar(
            name=f"weight {level:g}",
            x=[numbers[index] + 1 for index in turns],
            y=[confidence[index] for index in turns],
            width=0.8,
            marker_color=_weight_color(level, levels),
            customdata=[[_action(actions, numbers[index])] for index in turns],
            hovertemplate="turn %{x}: %{y:.3f}<br>%{customdata[0]}",
        )
    if pivot is not None:
        figure.add_hline(y=pivot, line={"dash": "dot", "width": 1.4, "color": _GREY})
    lay_out(figure, height=280, x="turn", y="confidence")
    figure.update_layout(barmode="overlay", showlegend=True)
    figure.update_yaxes(range=[0, 1.08], tickvals=[0, 0.25, 0.5, 0.75, 1])
    last = max(numbers, default=0) + 1
    figure.update_xaxes(range=[0.4, last + 0.6], tickformat="d", tickangle=0, dtick=max(1, -(-last // 12)))
    return figure


def values_by_turn(
    rows: Sequence[Mapping[str, Any]], key: str, title: str, pivot: float | None = None
) -> go.Figure | None:
    """Mean of a value over all first turns, all second turns and so on, with its 95 % interval.

    Args:
        rows: Of `metrics/confidence.jsonl`, one a pair.
        key: `confidence` or `weight`.
        title: Of the axis.
        pivot: Where to draw a dotted line.

    Returns:
        The figure; None if no turn has a value.
    """
    figure = go.Figure()
    most = 1.0
    for side, color in (("chosen", CHOSEN), ("rejected", REJECTED)):
        turns = _by_turn([row[side] for row in rows], key)
        most = max([most, *(value for values in turns.values() for value in values)])
        estimates = {
            turn: cluster_interval(values, list(range(len(values))), bounds=(0.0, max(1.0, *values)))
            for turn, values in turns.items()
        }
        if estimates:
            _add_band(figure, estimates, side, color)
    if not figure.data:
        return None
    if pivot is not None:
        figure.add_hline(y=pivot, line={"dash": "dot", "width": 1.4, "color": _GREY})
    lay_out(figure, height=280, x="turn", y=title)
    figure.update_layout(hovermode="x unified")
    figure.update_yaxes(range=[0, 1.08 * most], nticks=6)
    longest = max(max(trace.x) for trace in figure.data)
    figure.update_xaxes(tickformat="d", tickangle=0, dtick=max(1, -(-longest // 10)))
    return figure


def confidence_spread(rows: Sequence[Mapping[str, Any]], pivot: float | None) -> go.Figure | None:
    """How the confidences of all chosen and of all rejected turns are spread; None if there is none."""
    figure = go.Figure()
    edges = np.linspace(0, 1, 21)
    for side, color in (("chosen", CHOSEN), ("rejected", REJECTED)):
        values = [min(value, 1.0) for row in rows for value in row[side]["confidence"] if is_number(value)]
        if not values:
            continue
        counts, _ = np.histogram(values, edges)
        figure.add_bar(
            name=side,
            x=(edges[:-1] + 0.025).tolist(),
            y=(counts / len(values)).tolist(),
            marker_color=color,
            customdata=[
                [f"{low:.2f} to {low + 0.05:.2f}", int(n)] for low, n in zip(edges, counts, strict=False)
            ],
            hovertemplate="confidence %{customdata[0]}: %{y:.1%}, %{customdata[1]} turns",
        )
    if not figure.data:
        return None
    if pivot is not None:
        figure.add_vline(x=pivot, line={"dash": "dot", "width": 1.4, "color": _GREY})
    lay_out(figure, height=280, x="confidence", y="share of turns")
    figure.update_layout(barmode="group", bargap=0.1)
    figure.update_yaxes(tickformat=".0%")
    figure.update_xaxes(range=[0, 1])
    return figure


def success_by_length(lengths: Mapping[str, Sequence[tuple[int, bool]]]) -> go.Figure | None:
    """Success rate of episodes of about equal length, with Wilson intervals.

    Args:
        lengths: By policy, the turns of each episode and whether it succeeded.

    Returns:
        The figure; None if there is no episode.
    """
    figure = go.Figure()
    colors = policy_colors(list(lengths))
    for policy, episodes in lengths.items():
        groups = _length_groups(episodes)
        rates = [rate_interval(sum(ok for _, ok in group), len(group)) for group in groups]
        figure.add_scatter(
            name=plain(policy),
            x=[sum(turns for turns, _ in group) / len(group) for group in groups],
            y=[rate.mean for rate in rates],
            error_y={
                "array": [rate.high - rate.mean for rate in rates],
                "arrayminus": [rate.mean - rate.low for rate in rates],
                "thickness": 1.2,
                "width": 3,
            },
            customdata=[[_span(group), len(group)] for group in groups],
            mode="lines+markers",
            marker_size=8,
            line={"color": colors[policy], "width": 1.2, "dash": "dot"},
            hovertemplate="%{customdata[0]} turns: %{y:.1%} of %{customdata[1]}",
        )
    if not any(len(trace.x) for trace in figure.data):
        return None
    lay_out(figure, height=280, x="turns of the episode", y="success")
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    return figure


def task_differences(a: Mapping[str, float], b: Mapping[str, float]) -> go.Figure | None:
    """Score of a less that of b on each task, from the largest loss to the largest gain."""
    rows = sorted((a[task] - b[task], task) for task in a.keys() & b.keys())
    if not rows:
        return None
    step = -(-len(rows) // _TASKS)
    rows = rows[::step]
    figure = go.Figure()
    figure.add_bar(
        x=list(range(1, len(rows) + 1)),
        y=[round(value, 6) for value, _ in rows],
        marker_color=[REJECTED if value < 0 else CHOSEN for value, _ in rows],
        marker_line_width=0,
        customdata=[[plain(task)] for _, task in rows],
        hovertemplate="%{customdata[0]}: %{y:+.3f}<extra></extra>",
    )
    named = "tasks, by difference" if step == 1 else f"every {step}th task, by difference"
    lay_out(figure, height=240, x=named, y="difference")
    figure.update_layout(margin_t=10, showlegend=False, bargap=0.15)
    figure.update_xaxes(showticklabels=False, showgrid=False)
    return figure


def _add_band(figure: go.Figure, estimates: Mapping[int, Estimate], side: str, color: str) -> None:
    """A line of means over turns, with its interval as a band."""
    x = [turn + 1 for turn in estimates]
    items = list(estimates.values())
    figure.add_scatter(
        x=x + x[::-1],
        y=[item.high for item in items] + [item.low for item in items][::-1],
        mode="lines",
        fill="toself",
        fillcolor=_FADED[color],
        line_width=0,
        hoverinfo="skip",
        showlegend=False,
    )
    figure.add_scatter(
        name=side,
        x=x,
        y=[item.mean for item in items],
        customdata=[[item.n] for item in items],
        mode="lines+markers",
        marker_size=5,
        line={"color": color, "width": 1.8},
        hovertemplate="%{y:.3f}, %{customdata[0]} episodes",
    )


def _action(actions: Sequence[str], turn: int) -> str:
    return plain(actions[turn][:90]) if 0 <= turn < len(actions) else ""


def _weight_color(weight: float, levels: Sequence[float]) -> str:
    spread = levels[-1] - levels[0]
    share = (weight - levels[0]) / spread if spread else float(weight >= 1)
    color: str = sample_colorscale([LOW_WEIGHT, HIGH_WEIGHT], [share])[0]
    return color


def _by_turn(sides: Sequence[Mapping[str, Any]], key: str) -> dict[int, list[float]]:
    """Values of all first turns, all second turns and so on; rounding may have put a confidence above 1."""
    found: dict[int, list[float]] = {}
    for side in sides:
        values = side[key]
        numbers = side.get("turn") or range(len(values))
        for turn, value in zip(numbers, values, strict=False):
            if is_number(value):
                found.setdefault(turn, []).append(min(value, 1.0) if key == "confidence" else value)
    return dict(sorted(found.items()))


def _length_groups(episodes: Sequence[tuple[int, bool]]) -> list[list[tuple[int, bool]]]:
    """Episodes by length: a group a length if there are few lengths, or else groups of about equal size."""
    ordered = sorted(episodes)
    lengths = sorted({turns for turns, _ in ordered})
    if len(lengths) > _LENGTHS:
        edges = np.quantile([turns for turns, _ in ordered], np.linspace(0, 1, _LENGTHS + 1)[1:-1])
        groups = np.searchsorted(np.unique(edges), [turns for turns, _ in ordered], side="left").tolist()
    else:
        groups = [lengths.index(turns) for turns, _ in ordered]
    return [
        [episode for episode, its in zip(ordered, groups, strict=True) if its == group]
        for group in sorted(set(groups))
    ]


def _span(group: Sequence[tuple[int, bool]]) -> str:
    low, high = group[0][0], group[-1][0]
    return str(low) if low == high else f"{low} to {high}"
