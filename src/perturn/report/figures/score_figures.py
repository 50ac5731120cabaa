"""Draw scores of policies by kind of task, by length, by task and by number of episodes, and their errors by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from perturn.analysis.run_summary import success_rate
from perturn.report.figures.base import (
    GREY,
    SIDES,
    lay_out,
    number_turns,
    plain,
    policy_colors,
    reach,
    solid,
)

Episode = tuple[int, bool, str]
"""Number of turns, success, and task of an episode."""
_LENGTHS = 5
"""Maximum number of length groups for which success is drawn."""
_TASKS = 400
"""Maximum number of tasks whose differences are drawn. Beyond it, tasks are drawn at regular steps."""


def score_by_kind(
    by_kind: Mapping[str, Mapping[str, Mapping[str, Any]]], policies: Sequence[str]
) -> go.Figure:
    """Draw the average score of each policy on each kind of task, as grouped bars with intervals."""
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
            marker=solid(policy_colors(policies)[policy]),
            error_x=reach(means, [cell["interval"] for cell in cells.values()])
            | {"color": GREY, "thickness": 1.6},
        )
    height = max(220, 90 + len(by_kind) * (14 + 15 * len(policies)))
    lay_out(figure, "average score", height=height, barmode="group", bargap=0.25)
    return figure.update_yaxes(type="category", autorange="reversed")


def success_by_length(lengths: Mapping[str, Sequence[Episode]]) -> go.Figure | str | None:
    """Draw the success rate of episodes grouped by length, with intervals as `success_rate` describes.

    Args:
        lengths: Episodes of each policy.

    Returns:
        The figure; a sentence if all lengths are equal; None without episodes.
    """
    found = {turns for episodes in lengths.values() for turns, *_ in episodes}
    if len(found) == 1:
        return f"All episodes took {found.pop()} turns, so their length says nothing of their success."
    figure = go.Figure()
    for policy, episodes in lengths.items():
        groups = _length_groups(episodes)
        rates = [success_rate([ok for _, ok, _ in group], [task for *_, task in group]) for group in groups]
        means = [rate.mean for rate in rates]
        figure.add_scatter(
            name=plain(policy),
            x=[sum(turns for turns, *_ in group) / len(group) for group in groups],
            y=means,
            error_y=reach(means, [(rate.low, rate.high) for rate in rates]) | {"thickness": 1.2},
            customdata=[[_span(group), len(group)] for group in groups],
            mode="lines+markers",
            marker_size=8,
            line={"color": policy_colors(lengths)[policy], "width": 1.2, "dash": "dot"},
            hovertemplate="%{customdata[0]} turns: %{y:.1%} of %{customdata[1]}",
        )
    if not any(len(trace.x) for trace in figure.data):
        return None
    lay_out(figure, "turns of the episode", "success")
    return figure.update_yaxes(range=[0, 1.02], tickformat=".0%")


def task_differences(a: Mapping[str, float], b: Mapping[str, float]) -> go.Figure | str | None:
    """Draw the score of `a` minus the score of `b` on each task in ascending order; a sentence if all tasks tie."""
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
    lay_out(figure, named, "difference", height=240, showlegend=False, bargap=0.15)
    return figure.update_layout(margin_t=10).update_xaxes(showticklabels=False, showgrid=False)


def passes_by_episodes(policies: Mapping[str, Mapping[str, Any]]) -> go.Figure | None:
    """Draw pass@k and pass^k by k, with their intervals; None if no policy played a task several times.

    Args:
        policies: Row of each policy in `summary.json`, by the name that is shown.
    """
    figure = go.Figure()
    for key, name, dash in (("pass_at", "pass@k", "solid"), ("pass_hat", "pass^k", "dot")):
        for policy, row in policies.items():
            rates = {int(k): rate for k, rate in (row.get(key) or {}).items()}
            style = {"color": policy_colors(policies)[policy], "dash": dash}
            _add_rates(
                figure,
                f"{plain(policy)}, {name}",
                rates,
                style,
                "k = %{x}: %{y:.1%} of %{customdata[0]} tasks",
            )
    return _share_figure(figure, "k, episodes of a task", "probability") if figure.data else None


def errors_by_turn(policies: Mapping[str, Mapping[str, Any]]) -> go.Figure | None:
    """Draw the error rate of each turn before and after a first error of its episode; None without errors.

    Args:
        policies: Row of each policy in `summary.json`, by the name that is shown.
    """
    figure = go.Figure()
    for side, name, dash in (("before", "up to the first error", "solid"), ("after", "after it", "dot")):
        for policy, row in policies.items():
            of_turns = (row.get("errors") or {}).get("by_turn", ())
            rates = {each["turn"]: each[side] for each in of_turns if each[side]}
            style = {"color": policy_colors(policies)[policy], "dash": dash}
            _add_rates(
                figure,
                f"{plain(policy)}, {name}",
                rates,
                style,
                "turn %{x}: %{y:.1%} of %{customdata[0]} episodes",
            )
    has_errors = any(mean for trace in figure.data for mean in trace.y)
    return _share_figure(figure, "turn", "share of errors") if has_errors else None


def _add_rates(
    figure: go.Figure, name: str, rates: Mapping[int, Mapping[str, Any]], style: Mapping[str, Any], hover: str
) -> None:
    """Add a line of rates with their intervals to a figure; nothing without a rate.

    Args:
        figure: The figure.
        name: Name of the line.
        rates: Number on the x axis -> `mean`, `interval` and `n`.
        style: Color and dash of the line.
        hover: Text that is shown at a point.
    """
    if not rates:
        return
    means = [each["mean"] for each in rates.values()]
    figure.add_scatter(
        name=name,
        x=list(rates),
        y=means,
        error_y=reach(means, [each["interval"] for each in rates.values()]) | {"thickness": 1.0},
        customdata=[[each["n"]] for each in rates.values()],
        mode="lines+markers",
        marker_size=5,
        line={"width": 1.6, **style},
        hovertemplate=hover,
    )


def _share_figure(figure: go.Figure, x: str, y: str) -> go.Figure:
    """Lay out a figure of shares by whole numbers."""
    lay_out(figure, x, y)
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    return number_turns(figure, max(trace.x[-1] for trace in figure.data), most=10)


def _length_groups(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """Group episodes by length: one group for each length if there are few lengths, else groups of similar size."""
    ordered = sorted(episodes)
    turns = [length for length, *_ in ordered]
    edges = np.unique(turns)
    if len(edges) > _LENGTHS:
        edges = np.unique(np.quantile(turns, np.linspace(0, 1, _LENGTHS + 1)[1:-1]))
    groups: dict[int, list[Episode]] = {}
    for episode, group in zip(ordered, np.searchsorted(edges, turns, side="left").tolist(), strict=True):
        groups.setdefault(group, []).append(episode)
    return list(groups.values())


def _span(group: Sequence[Episode]) -> str:
    low, high = group[0][0], group[-1][0]
    return str(low) if low == high else f"{low} to {high}"
