"""The report's plotly figures: plain data in, a figure out. Colours of text and grid come with the theme."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from perturn.stats import cluster_interval, rate_interval

SIDES = {"chosen": "#3b82c4", "rejected": "#cf5c36"}
_FADED = {"chosen": "rgba(59, 130, 196, 0.18)", "rejected": "rgba(207, 92, 54, 0.18)"}
POLICIES = {"base": "#98a1ab", "sft": "#5fa8d3"}
OTHERS = ["#e0982c", "#6a9f58", "#a06cb0", "#cf5c36"]
_LINES = [SIDES["chosen"], *OTHERS]
_WEIGHTS = ["#9fb0c0", "#e0982c"]  # the lowest, the highest
_GREY = "#7a828c"
_DOTTED = {"dash": "dot", "width": 1.4, "color": _GREY}
MOST_POINTS = 2000
"""Points of one curve; more cannot be told apart on a screen."""
_LENGTHS = 5
"""Groups of lengths that success is given for, at most."""
_TASKS = 400
"""Tasks whose differences are drawn one by one; of more, every so-manieth."""


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
    font = {"family": "system-ui, sans-serif", "size": 12}
    lines = dict.fromkeys(("gridcolor", "linecolor", "zerolinecolor"), grid)
    axis = {**lines, "automargin": True, "title.standoff": 8}
    clear = "rgba(0,0,0,0)"
    layout = go.Layout(
        font={"color": text, **font},
        paper_bgcolor=clear,
        plot_bgcolor=clear,
        xaxis=axis,
        yaxis=axis,
        hoverlabel={"font": font},
    )
    return {"layout": layout.to_plotly_json()}


def score_by_kind(
    by_kind: Mapping[str, Mapping[str, Mapping[str, Any]]], policies: Sequence[str]
) -> go.Figure:
    """Average score of each policy on each kind of task: grouped bars with their intervals."""
    figure = go.Figure()
    for policy in policies:
        cells = {kind: row[policy] for kind, row in by_kind.items() if policy in row}
        means = [cell["mean_score"] for cell in cells.values()]
        figure.add_bar(
            name=plain(policy),
            orientation="h",
            x=means,
            y=[plain(kind) or "(no kind)" for kind in cells],
            customdata=[[cell["n"]] for cell in cells.values()],
            hovertemplate="%{x:.3f}, n = %{customdata[0]}",
            marker=_solid(policy_colors(policies)[policy]),
            error_x=_reach(means, [cell["interval"] for cell in cells.values()])
            | {"color": _GREY, "thickness": 1.6},
        )
    height = max(220, 90 + len(by_kind) * (14 + 15 * len(policies)))
    _lay_out(figure, "average score", height=height, barmode="group", bargap=0.25)
    return figure.update_yaxes(type="category", autorange="reversed")


def metric_lines(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], chart: Chart, *, height: int = 240
) -> go.Figure | str | None:
    """Logged values over optimizer steps, or in a sentence if there was one step; None if none was logged.

    Args:
        runs: Rows of each run's metrics file, by the run's name.
        chart: Which values.
        height: Of the figure, in pixels.
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
    _lay_out(figure, "optimizer step", height=height, hovermode="x unified", showlegend=several)
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
    """(step, value) of the rows that have the value; long curves are thinned to what a screen can show."""
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
    """One run: a colour a value. Several: a colour a run, and dashes for the rejected side."""
    name = key.rsplit("/", 1)[-1]
    if len(runs) == 1:
        known = SIDES | {"margins": OTHERS[1]}
        return {"color": known.get(name, [_LINES[0], *OTHERS[::-1]][index % 5]), "width": 1.8}
    dash = "dot" if name == "rejected" else "solid"
    return {"color": _LINES[list(runs).index(run) % 5], "width": 1.8, "dash": dash}


def confidence_bars(side: Mapping[str, Any], actions: Sequence[str], pivot: float | None) -> go.Figure:
    """Confidence of each turn of one episode, coloured by the weight the turn is given.

    Args:
        side: One side of a row of `metrics/confidence.jsonl`.
        actions: Text of each turn.
        pivot: Where to draw a dotted line.
    """
    confidence, weight = side["confidence"], [round(value, 6) for value in side["weight"]]
    numbers, said = _numbers(side, confidence), dict(enumerate(actions))
    figure = go.Figure()
    levels = sorted(set(weight))
    for level in levels:
        turns = [index for index, value in enumerate(weight) if value == level]
        figure.add_bar(
            name=f"weight {level:g}",
            x=[numbers[index] + 1 for index in turns],
            y=[confidence[index] for index in turns],
            width=0.8,
            marker=_solid(_weight_color(level, levels)),
            customdata=[[plain(said.get(numbers[index], "")[:90])] for index in turns],
            hovertemplate="turn %{x}: %{y:.3f}<br>%{customdata[0]}",
        )
    if pivot is not None:
        figure.add_hline(y=pivot, line=_DOTTED)
    last = max(numbers, default=0) + 1
    _lay_out(figure, "turn", "confidence", barmode="overlay", showlegend=True)
    figure.update_yaxes(range=[0, 1.08], tickvals=[0, 0.25, 0.5, 0.75, 1])
    figure.update_xaxes(range=[0.4, last + 0.6])
    return _count_turns(figure, last, most=12)


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
    most, longest = 1.0, 0
    for side in SIDES:
        if turns := _by_turn([row[side] for row in rows], key):
            most = max(most, *(value for values in turns.values() for value in values))
            longest = max(longest, *(turn + 1 for turn in turns))
            _add_band(figure, turns, side)
    if not figure.data:
        return None
    if pivot is not None:
        figure.add_hline(y=pivot, line=_DOTTED)
    _lay_out(figure, "turn", title, hovermode="x unified")
    figure.update_yaxes(range=[0, 1.08 * most], nticks=6)
    return _count_turns(figure, longest, most=10)


def _count_turns(figure: go.Figure, last: int, most: int) -> go.Figure:
    """Number the turns, with at most so many numbers."""
    return figure.update_xaxes(tickformat="d", tickangle=0, dtick=max(1, -(-last // most)))


def _add_band(figure: go.Figure, turns: Mapping[int, list[float]], side: str) -> None:
    """A line of means over turns, with its interval as a band."""
    x = [turn + 1 for turn in turns]
    found = [
        cluster_interval(values, list(range(len(values))), bounds=(0.0, max(1.0, *values)))
        for values in turns.values()
    ]
    figure.add_scatter(
        x=x + x[::-1],
        y=[one.high for one in found] + [one.low for one in found][::-1],
        mode="lines",
        fill="toself",
        fillcolor=_FADED[side],
        line_width=0,
        hoverinfo="skip",
        showlegend=False,
    )
    figure.add_scatter(
        name=side,
        x=x,
        y=[one.mean for one in found],
        customdata=[[one.n] for one in found],
        mode="lines+markers",
        marker_size=5,
        line={"color": SIDES[side], "width": 1.8},
        hovertemplate="%{y:.3f}, %{customdata[0]} episodes",
    )


def confidence_spread(rows: Sequence[Mapping[str, Any]], pivot: float | None) -> go.Figure | None:
    """How the confidences of all chosen and of all rejected turns are spread; None if there is none."""
    figure = go.Figure()
    edges = np.linspace(0, 1, 21)
    for side, color in SIDES.items():
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
        figure.add_vline(x=pivot, line=_DOTTED)
    _lay_out(figure, "confidence", "share of turns", barmode="group", bargap=0.1)
    return figure.update_yaxes(tickformat=".0%").update_xaxes(range=[0, 1])


def success_by_length(lengths: Mapping[str, Sequence[tuple[int, bool]]]) -> go.Figure | str | None:
    """Success rate of episodes of about equal length, with Wilson intervals.

    Args:
        lengths: By policy, the turns of each episode and whether it succeeded.

    Returns:
        The figure; a sentence if all lengths are equal, and None if there is no episode.
    """
    found = {turns for episodes in lengths.values() for turns, _ in episodes}
    if len(found) == 1:
        return f"All episodes took {found.pop()} turns, so their length says nothing of their success."
    figure = go.Figure()
    for policy, episodes in lengths.items():
        groups = _length_groups(episodes)
        rates = [rate_interval(sum(ok for _, ok in group), len(group)) for group in groups]
        means = [rate.mean for rate in rates]
        figure.add_scatter(
            name=plain(policy),
            x=[sum(turns for turns, _ in group) / len(group) for group in groups],
            y=means,
            error_y=_reach(means, [(rate.low, rate.high) for rate in rates]) | {"thickness": 1.2},
            customdata=[[_span(group), len(group)] for group in groups],
            mode="lines+markers",
            marker_size=8,
            line={"color": policy_colors(lengths)[policy], "width": 1.2, "dash": "dot"},
            hovertemplate="%{customdata[0]} turns: %{y:.1%} of %{customdata[1]}",
        )
    if not any(len(trace.x) for trace in figure.data):
        return None
    _lay_out(figure, "turns of the episode", "success")
    return figure.update_yaxes(range=[0, 1.02], tickformat=".0%")


def task_differences(a: Mapping[str, float], b: Mapping[str, float]) -> go.Figure | str | None:
    """Score of a less that of b on each task, from the largest loss to the largest gain; a sentence if all tie."""
    rows = sorted((a[task] - b[task], task) for task in a.keys() & b.keys())
    if not rows:
        return None
    if all(round(value, 6) == 0 for value, _ in rows):
        return f"Both score the same on {'the one task' if len(rows) == 1 else f'each of {len(rows)} tasks'}."
    step = -(-len(rows) // _TASKS)
    rows = rows[::step]
    figure = go.Figure()
    figure.add_bar(
        x=list(range(1, len(rows) + 1)),
        y=[round(value, 6) for value, _ in rows],
        marker_color=[SIDES["rejected" if value < 0 else "chosen"] for value, _ in rows],
        marker_line_width=0,
        customdata=[[plain(task)] for _, task in rows],
        hovertemplate="%{customdata[0]}: %{y:+.3f}<extra></extra>",
    )
    named = "tasks, by difference" if step == 1 else f"every {step}th task, by difference"
    _lay_out(figure, named, "difference", height=240, showlegend=False, bargap=0.15)
    return figure.update_layout(margin_t=10).update_xaxes(showticklabels=False, showgrid=False)


def is_number(value: Any) -> bool:
    """Whether a logged value can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def plain(text: str) -> str:
    """Text that plotly shows as it is, though it reads some elements in labels."""
    return html.escape(text, quote=False)


def policy_colors(policies: Iterable[str]) -> dict[str, str]:
    """A colour for each policy; base and sft keep theirs."""
    aligned = [policy for policy in policies if policy not in POLICIES]
    return POLICIES | {policy: OTHERS[index % len(OTHERS)] for index, policy in enumerate(aligned)}


def _lay_out(figure: go.Figure, x: str, y: str | None = None, *, height: int = 280, **layout: Any) -> None:
    """Size, margins, axis titles and legend that all figures have in common."""
    figure.update_layout(
        template=None,
        height=height,
        margin={"l": 8, "r": 12, "t": 34, "b": 8},
        xaxis_title=x,
        yaxis_title=y,
        dragmode=False,
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "title": None},
        **layout,
    )


def _reach(means: Sequence[float], ends: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    """Error bars from intervals; of length 0 where there is none."""
    both = list(zip(means, ends, strict=True))
    return {
        "array": [0.0 if high is None else max(0.0, high - mean) for mean, (_, high) in both],
        "arrayminus": [0.0 if low is None else max(0.0, mean - low) for mean, (low, _) in both],
        "width": 3,
    }


def _solid(color: str) -> dict[str, Any]:
    """A bar with an outline, which is seen where its value is 0."""
    return {"color": color, "line": {"color": color, "width": 2}}


def _weight_color(weight: float, levels: Sequence[float]) -> str:
    spread = levels[-1] - levels[0]
    share = (weight - levels[0]) / spread if spread else float(weight >= 1)
    return str(sample_colorscale(_WEIGHTS, [share])[0])


def _numbers(side: Mapping[str, Any], values: Sequence[Any]) -> Sequence[int]:
    """The turn that each value belongs to."""
    return side.get("turn") or range(len(values))


def _by_turn(sides: Sequence[Mapping[str, Any]], key: str) -> dict[int, list[float]]:
    """Values of all first turns, all second turns and so on; rounding may have put a confidence above 1."""
    found: dict[int, list[float]] = {}
    for side in sides:
        for turn, value in zip(_numbers(side, side[key]), side[key], strict=False):
            if is_number(value):
                found.setdefault(turn, []).append(min(value, 1.0) if key == "confidence" else value)
    return dict(sorted(found.items()))


def _length_groups(episodes: Sequence[tuple[int, bool]]) -> list[list[tuple[int, bool]]]:
    """Episodes by length: a group a length if there are few lengths, or else groups of about equal size."""
    ordered = sorted(episodes)
    turns = [length for length, _ in ordered]
    edges = np.unique(turns)
    if len(edges) > _LENGTHS:
        edges = np.unique(np.quantile(turns, np.linspace(0, 1, _LENGTHS + 1)[1:-1]))
    groups: dict[int, list[tuple[int, bool]]] = {}
    for episode, group in zip(ordered, np.searchsorted(edges, turns, side="left").tolist(), strict=True):
        groups.setdefault(group, []).append(episode)
    return list(groups.values())


def _span(group: Sequence[tuple[int, bool]]) -> str:
    low, high = group[0][0], group[-1][0]
    return str(low) if low == high else f"{low} to {high}"
