"""Draw the confidence and the weight of turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from perturn.data.iteration_numbers import is_number
from perturn.report.figures.base import DOTTED, SIDES, lay_out, number_turns, plain, solid
from perturn.stats import Estimate, cluster_interval

_FADED = {"chosen": "rgba(59, 130, 196, 0.18)", "rejected": "rgba(207, 92, 54, 0.18)"}
_SIGNED = [[0.0, SIDES["rejected"]], [0.5, "rgba(128, 138, 148, 0.25)"], [1.0, SIDES["chosen"]]]
_UNSIGNED = [[0.0, "rgba(128, 138, 148, 0.25)"], [1.0, "#e0982c"]]
_WEIGHTS = ["#9fb0c0", "#e0982c"]  # lowest and highest weight
_MOST_LEVELS = 6
"""Maximum number of weights with an entry in the legend. More weights are shown by a colour bar."""


def confidence_bars(side: Mapping[str, Any], actions: Sequence[str], pivot: float | None) -> go.Figure:
    """Draw the confidence of each turn of an episode, coloured by the weight of the turn.

    Args:
        side: One side of a row of `metrics/confidence.jsonl`.
        actions: Text of each turn's action.
        pivot: Confidence at which a dotted line is drawn; None for no line.
    """
    confidence, weight = side["confidence"], [round(value, 6) for value in side["weight"]]
    numbers, said = _numbers(side, confidence), dict(enumerate(actions))
    figure = go.Figure()
    levels = sorted(set(weight))
    if len(levels) > _MOST_LEVELS:
        bars: list[tuple[str, Sequence[int], dict[str, Any]]] = [("", range(len(weight)), _scale(weight))]
    else:
        at = {level: [index for index, value in enumerate(weight) if value == level] for level in levels}
        bars = [(f"weight {level:g}", at[level], solid(_weight_color(level, levels))) for level in levels]
    for name, turns, marker in bars:
        figure.add_bar(
            name=name,
            x=[numbers[index] + 1 for index in turns],
            y=[confidence[index] for index in turns],
            width=0.8,
            marker=marker,
            customdata=[[plain(said.get(numbers[index], "")[:90]), weight[index]] for index in turns],
            hovertemplate="turn %{x}: %{y:.3f}, weight %{customdata[1]:g}<br>%{customdata[0]}<extra></extra>",
        )
    if pivot is not None:
        figure.add_hline(y=pivot, line=DOTTED)
    last = max(numbers, default=0) + 1
    lay_out(figure, "turn", "confidence", barmode="overlay", showlegend=len(bars) == len(levels))
    figure.update_yaxes(range=[0, 1.08], tickvals=[0, 0.25, 0.5, 0.75, 1])
    figure.update_xaxes(range=[0.4, last + 0.6])
    return number_turns(figure, last, most=12)


def values_by_turn(
    rows: Sequence[Mapping[str, Any]],
    tasks: Sequence[str],
    key: str,
    title: str,
    pivot: float | None = None,
) -> go.Figure | None:
    """Draw the mean of a value by turn number, with its 95 % interval, clustered by task.

    Args:
        rows: Rows of `metrics/confidence.jsonl`, one for each pair.
        tasks: Task of each pair. Pairs of a task may share an episode.
        key: `confidence` or `weight`.
        title: Title of the axis.
        pivot: Value at which a dotted line is drawn; None for no line.

    Returns:
        The figure; None if no turn has a value.
    """
    figure = go.Figure()
    least, most, longest = 0.0, 1.0, 0
    for side in SIDES:
        if turns := _by_turn([row[side] for row in rows], tasks, key):
            known = [value for values in turns.values() for value, _ in values]
            least, most = min(least, *known), max(most, *known)
            longest = max(longest, *(turn + 1 for turn in turns))
            _add_band(figure, turns, side)
    if not figure.data:
        return None
    if pivot is not None:
        figure.add_hline(y=pivot, line=DOTTED)
    lay_out(figure, "turn", title, hovermode="x unified")
    figure.update_yaxes(range=[1.08 * least, 1.08 * most], nticks=6)
    return number_turns(figure, longest, most=10)


def _mean(values: Sequence[float], tasks: Sequence[str]) -> Estimate:
    """Return a mean with its interval, clustered by task. Several equal values have no spread to show."""
    if len(values) > 1 and min(values) == max(values):
        return Estimate(values[0], values[0], values[0], len(set(tasks)))
    return cluster_interval(values, tasks, bounds=(min(0.0, *values), max(1.0, *values)))


def _add_band(figure: go.Figure, turns: Mapping[int, list[tuple[float, str]]], side: str) -> None:
    """Add a line of means by turn number, with its interval as a band. Equal values have no band."""
    x = [turn + 1 for turn in turns]
    found = [_mean(*zip(*values, strict=True)) for values in turns.values()]
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
        customdata=[[len(values), one.n] for values, one in zip(turns.values(), found, strict=True)],
        mode="lines+markers",
        marker_size=5,
        line={"color": SIDES[side], "width": 1.8},
        hovertemplate="%{y:.3f}, pairs: %{customdata[0]}, tasks: %{customdata[1]}",
    )


def confidence_spread(rows: Sequence[Mapping[str, Any]], pivot: float | None) -> go.Figure | None:
    """Draw the distributions of confidence over all chosen and all rejected turns; None without such values."""
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
        figure.add_vline(x=pivot, line=DOTTED)
    lay_out(figure, "confidence", "share of turns", barmode="group", bargap=0.1)
    return figure.update_yaxes(tickformat=".0%").update_xaxes(range=[0, 1])


def _weight_color(weight: float, levels: Sequence[float]) -> str:
    spread = levels[-1] - levels[0]
    share = (weight - levels[0]) / spread if spread else float(weight >= 1)
    return str(sample_colorscale(_WEIGHTS, [share])[0])


def _scale(weight: Sequence[float]) -> dict[str, Any]:
    """Return the style of bars that are coloured by their weights, with a colour bar."""
    colors = {"color": weight, "colorscale": _WEIGHTS}
    bar = {"title": "weight", "thickness": 10, "outlinewidth": 0}
    return {**colors, "colorbar": bar, "line": {**colors, "width": 2}}


def _numbers(side: Mapping[str, Any], values: Sequence[Any]) -> Sequence[int]:
    """Return the turn of each value."""
    return side.get("turn") or range(len(values))


def _by_turn(
    sides: Sequence[Mapping[str, Any]], tasks: Sequence[str], key: str
) -> dict[int, list[tuple[float, str]]]:
    """Return the values with their tasks, by turn number. A confidence above 1, due to rounding, becomes 1."""
    found: dict[int, list[tuple[float, str]]] = {}
    for side, task in zip(sides, tasks, strict=True):
        for turn, value in zip(_numbers(side, side[key]), side[key], strict=False):
            if is_number(value):
                found.setdefault(turn, []).append((min(value, 1.0) if key == "confidence" else value, task))
    return dict(sorted(found.items()))


def group_map(samples: Sequence[Mapping[str, Any]]) -> go.Figure | None:
    """Draw the weight of each turn in the samples of a task, with one row per sample; None without weights.

    Args:
        samples: Samples returned by `episode_view.shown_group`.
    """
    known = [value for one in samples for value in one["weights"] if value is not None]
    if not known:
        return None
    most = max(map(abs, known)) or 1.0
    longest = max(one["turns"] for one in samples)
    figure = go.Figure()
    figure.add_heatmap(
        z=[[*one["weights"], *[None] * (longest - len(one["weights"]))] for one in samples],
        x=list(range(1, longest + 1)),
        y=[f"#{one['sample']}, {one['score']:.2f}" for one in samples],
        customdata=[
            [
                *(_said(*each) for each in zip(one["actions"], one["valid"], strict=True)),
                *[""] * (longest - one["turns"]),
            ]
            for one in samples
        ],
        zmin=-most if min(known) < 0 else 0,
        zmax=most,
        colorscale=_SIGNED if min(known) < 0 else _UNSIGNED,
        xgap=1,
        ygap=2,
        colorbar={"thickness": 10, "outlinewidth": 0},
        hovertemplate="%{y}, turn %{x}: %{z:.3f}<br>%{customdata}<extra></extra>",
        hoverongaps=False,
    )
    lay_out(figure, "turn", height=110 + 26 * len(samples))
    figure.update_layout(margin_t=10).update_xaxes(showgrid=False)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return number_turns(figure, longest, most=10)


def _said(action: str, valid: bool) -> str:
    return plain(action[:90]) + ("" if valid else " (invalid)")
