"""Colours, layout and error bars that all figures share. The page's theme sets the colours of text and grid."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

import plotly.graph_objects as go

SIDES = {"chosen": "#3b82c4", "rejected": "#cf5c36"}
POLICIES = {"base": "#98a1ab", "sft": "#5fa8d3"}
OTHERS = ["#e0982c", "#6a9f58", "#a06cb0", "#cf5c36"]
LINES = [SIDES["chosen"], *OTHERS]
_DASHES = {"solid": ("solid", "dash", "longdash"), "dot": ("dot", "dashdot", "longdashdot")}
GREY = "#7a828c"
DOTTED = {"dash": "dot", "width": 1.4, "color": GREY}


def theme(text: str, grid: str) -> dict[str, Any]:
    """Return a plotly template with these colours of text and grid, which fits any background."""
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


def number_turns(figure: go.Figure, last: int, most: int) -> go.Figure:
    """Label the turn axis with at most `most` numbers."""
    return figure.update_xaxes(tickformat="d", tickangle=0, dtick=max(1, -(-last // most)))


def plain(text: str) -> str:
    """Escape a text for plotly, which reads some HTML elements in labels."""
    return html.escape(text, quote=False)


def policy_colors(policies: Iterable[str]) -> dict[str, str]:
    """Return a colour for each policy. The colours of `base` and `sft` are fixed."""
    aligned = [policy for policy in policies if policy not in POLICIES]
    return POLICIES | {policy: OTHERS[index % len(OTHERS)] for index, policy in enumerate(aligned)}


def run_line(number: int, dash: str = "solid") -> dict[str, Any]:
    """Return the style of a run's line. Runs of the same colour have different dashes.

    Args:
        number: Position of the run.
        dash: `solid`, or `dot` for the run's second value in a figure.
    """
    dashes = _DASHES[dash]
    return {"color": LINES[number % len(LINES)], "dash": dashes[number // len(LINES) % len(dashes)]}


def lay_out(figure: go.Figure, x: str, y: str | None = None, *, height: int = 280, **layout: Any) -> None:
    """Give a figure a layout with the size, margins, axis titles and legend that all figures share.

    Lines and annotations of an earlier layout are kept. The layout is replaced instead of updated, because plotly takes
    three times as long to merge settings.
    """
    figure.layout = {
        "shapes": figure.layout.shapes,
        "annotations": figure.layout.annotations,
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 34, "b": 8},
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": y}},
        "dragmode": False,
        "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"},
        **layout,
    }
    figure.layout.template = None


def reach(means: Sequence[float], ends: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    """Return error bars from intervals, with length 0 for a missing end."""
    both = list(zip(means, ends, strict=True))
    return {
        "array": [0.0 if high is None else max(0.0, high - mean) for mean, (_, high) in both],
        "arrayminus": [0.0 if low is None else max(0.0, mean - low) for mean, (low, _) in both],
        "width": 3,
    }


def solid(color: str) -> dict[str, Any]:
    """Return the style of a bar with an outline, which stays visible at value 0."""
    return {"color": color, "line": {"color": color, "width": 2}}
