"""The report's plotly figures: plain data in, a figure out. Colours of text and grid come with the theme."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from turnwise.stats import cluster_interval

CHOSEN, REJECTED = "#3b82c4", "#cf5c36"
LOW_WEIGHT, HIGH_WEIGHT = "#9fb0c0", "#e0982c"
POLICIES = {"base": "#98a1ab", "sft": "#5fa8d3"}
OTHERS = ["#e0982c", "#6a9f58", "#a06cb0", "#cf5c36"]
_FADED = {CHOSEN: "rgba(59, 130, 196, 0.18)", REJECTED: "rgba(207, 92, 54, 0.18)"}


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
    colors = _policy_colors(policies)
    for policy in policies:
        cells = {kind: row[policy] for kind, row in by_kind.items() if policy in row}
        means = [cell["mean_score"] for cell in cells.values()]
        ends = [cell["interval"] for cell in cells.values()]
        figure.add_bar(
            name=_plain(policy),
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
    _lay_out(figure, height=max(220, height), x="average score", y="")
    figure.update_yaxes(type="category", autorange="reversed")
    figure.update_layout(barmode="group", bargap=0.25)
    return figure


def metric_lines(rows: Sequence[Mapping[str, Any]], chart: Chart, *, height: int = 240) -> go.Figure | None:
    """Logged values over optimizer steps; None if none of them was logged."""
    figure = go.Figure()
    shown: list[float] = []
    for index, key in enumerate(chart.keys):
        points = [
            (row.get("step", position), row[key])
            for position, row in enumerate(rows)
            if is_number(row.get(key))
        ]
        if not points:
            continue
        shown += [value for _, value in points]
        name = key.rsplit("/", 1)[-1]
        figure.add_scatter(
            name=_plain(name.replace("_", " ")),
            x=[step for step, _ in points],
            y=[value for _, value in points],
            mode="lines+markers" if len(points) < 30 else "lines",
            marker_size=5,
            line={"color": _line_color(name, index), "width": 1.8},
            hovertemplate="%{y:.4g}",
        )
    if not shown:
        return None
    _lay_out(figure, height=height, x="optimizer step", y="")
    figure.update_yaxes(exponentformat="power", showexponent="all", minexponent=2)
    figure.update_layout(hovermode="x unified", showlegend=len(figure.data) > 1)
    if len(figure.data) == 1:
        figure.update_layout(margin_t=10)
    if chart.log and min(shown) > 0 and max(shown) / min(shown) > 100:
        figure.update_yaxes(type="log", dtick=_decades(min(shown), max(shown)))
    if min(shown) == max(shown) == 0:
        figure.update_yaxes(range=[0, 1])
    return figure


def confidence_bars(
    confidence: Sequence[float], weight: Sequence[float], actions: Sequence[str], pivot: float | None
) -> go.Figure:
    """Confidence of each turn of one episode, coloured by the weight the turn is given."""
    figure = go.Figure()
    levels = sorted(set(weight))
    for level in levels:
        turns = [index for index, value in enumerate(weight) if value == level]
        figure.add_bar(
            name=f"weight {level:g}",
            x=[index + 1 for index in turns],
            y=[confidence[index] for index in turns],
            width=0.8,
            marker_color=_weight_color(level, levels),
            customdata=[[_plain(actions[index][:90]) if index < len(actions) else ""] for index in turns],
            hovertemplate="turn %{x}: %{y:.3f}<br>%{customdata[0]}",
        )
    if pivot is not None:
        figure.add_hline(y=pivot, line={"dash": "dot", "width": 1.4, "color": "#7a828c"})
    _lay_out(figure, height=280, x="turn", y="confidence")
    figure.update_layout(barmode="overlay", showlegend=True)
    figure.update_yaxes(range=[0, 1.08], tickvals=[0, 0.25, 0.5, 0.75, 1])
    figure.update_xaxes(
        range=[0.4, len(confidence) + 0.6], tickformat="d", dtick=max(1, len(confidence) // 12)
    )
    return figure


def confidence_by_turn(rows: Sequence[Mapping[str, Any]], pivot: float | None) -> go.Figure:
    """Mean confidence of all first turns, all second turns and so on, with its 95 % interval."""
    figure = go.Figure()
    for side, color in (("chosen", CHOSEN), ("rejected", REJECTED)):
        turns = _by_turn([row[side]["confidence"] for row in rows])
        estimates = [cluster_interval(values, list(range(len(values)))) for values in turns]
        x = list(range(1, len(estimates) + 1))
        figure.add_scatter(
            x=x + x[::-1],
            y=[item.high for item in estimates] + [item.low for item in estimates][::-1],
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
            y=[item.mean for item in estimates],
            customdata=[[item.n] for item in estimates],
            mode="lines+markers",
            marker_size=5,
            line={"color": color, "width": 1.8},
            hovertemplate="%{y:.3f}, %{customdata[0]} episodes",
        )
    if pivot is not None:
        figure.add_hline(y=pivot, line={"dash": "dot", "width": 1.4, "color": "#7a828c"})
    _lay_out(figure, height=280, x="turn", y="mean confidence")
    figure.update_layout(hovermode="x unified")
    figure.update_yaxes(range=[0, 1.08], tickvals=[0, 0.25, 0.5, 0.75, 1])
    longest = max(len(trace.x) for trace in figure.data)
    figure.update_xaxes(tickformat="d", dtick=max(1, longest // 16))
    return figure


def label_of_kind(kind: str) -> str:
    """A task kind as an axis shows it."""
    return _plain(kind) or "(no kind)"


def is_number(value: Any) -> bool:
    """Whether a logged value can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _plain(text: str) -> str:
    """Text that plotly shows as it is, though it reads some elements in labels."""
    return html.escape(text, quote=False)


def _lay_out(figure: go.Figure, *, height: int, x: str, y: str) -> None:
    figure.update_layout(
        template=None,
        height=height,
        margin={"l": 8, "r": 12, "t": 34, "b": 8},
        xaxis_title=x,
        yaxis_title=y or None,
        dragmode=False,
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "title": None},
    )


def _policy_colors(policies: Sequence[str]) -> dict[str, str]:
    aligned = [policy for policy in policies if policy not in POLICIES]
    return POLICIES | {policy: OTHERS[index % len(OTHERS)] for index, policy in enumerate(aligned)}


def _reach(outer: float | None, inner: float | None) -> float:
    """Length of an error bar; 0 where there is no interval."""
    return 0.0 if outer is None or inner is None else max(0.0, outer - inner)


def _line_color(name: str, index: int) -> str:
    known = {"chosen": CHOSEN, "rejected": REJECTED, "margins": "#6a9f58"}
    return known.get(name, [CHOSEN, *OTHERS[::-1]][index % 5])


def _weight_color(weight: float, levels: Sequence[float]) -> str:
    spread = levels[-1] - levels[0]
    share = (weight - levels[0]) / spread if spread else float(weight >= 1)
    color: str = sample_colorscale([LOW_WEIGHT, HIGH_WEIGHT], [share])[0]
    return color


def _by_turn(episodes: Sequence[Sequence[float]]) -> list[list[float]]:
    """Confidences of all first turns, all second turns and so on; rounding may have put one above 1."""
    longest = max((len(episode) for episode in episodes), default=0)
    turns = [
        [min(e[turn], 1.0) for e in episodes if turn < len(e) and is_number(e[turn])]
        for turn in range(longest)
    ]
    return [turn for turn in turns if turn]


def _decades(low: float, high: float) -> int:
    return max(1, round((math.log10(high) - math.log10(low)) / 5))
