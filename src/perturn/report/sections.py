"""Which figures the page shows, and what is said under each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from plotly.io import to_json

from perturn.data.outcomes import score, succeeded
from perturn.report import figures, figures_turns
from perturn.report.figures import Chart
from perturn.report.folder import RecordedRun, Row, aligned_policy
from perturn.report.summary import scores_by_task

_SFT = (
    Chart("Loss", ("loss",), "On expert trajectories."),
    Chart("Gradient norm", ("grad_norm",), "Before clipping."),
    Chart("Learning rate", ("learning_rate",)),
)
_MARGIN = Chart(
    "Reward margin",
    ("rewards/margins",),
    "Implicit reward of the chosen side less that of the rejected. Compare Figure 3 of the tlm-DRE paper.",
)
_ALIGN = (
    Chart("Loss", ("loss",)),
    Chart("Rewards", ("rewards/chosen", "rewards/rejected"), "Implicit rewards of the two sides."),
    Chart(
        "Reward accuracy", ("rewards/accuracies",), "Share of pairs whose chosen side has the higher reward."
    ),
    Chart("Log-probability", ("logps/chosen", "logps/rejected"), "Under the policy, in nats."),
    Chart("Gradient norm", ("grad_norm",), "Before clipping."),
    Chart("Learning rate", ("learning_rate",)),
)
_DENSITY = (
    Chart(
        "Log-ratio",
        ("log_ratio/chosen", "log_ratio/rejected"),
        "How far the policy has moved from its reference, in nats. It starts at 0.",
    ),
    Chart(
        "Gradient weight",
        ("gradient_weight/chosen", "gradient_weight/rejected"),
        "How strongly each side pulls. A side near 0 no longer trains.",
        log=True,
    ),
    Chart(
        "Coefficient",
        ("coefficient",),
        "C of the chosen side, which carries no gradient. Near 0, chosen episodes do not train.",
        log=True,
    ),
    Chart(
        "Clamped", ("clamped",), "Log-ratios that met their limit. Above 0, the loss is not the one written."
    ),
    Chart(
        "Turn weights",
        ("weight/chosen", "weight/rejected"),
        "Mean weight of a turn, as the credit wrote it.",
    ),
)
_UNDRAWN = {"step", "epoch"}


@dataclass(frozen=True)
class Figure:
    """One figure of the page."""

    id: str
    title: str
    caption: str
    height: int
    json: Markup
    """The plotly figure, safe inside a script element."""


def sections(
    runs: Mapping[str, RecordedRun], summaries: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[Figure]]:
    """Figures of each section, in order; a section without data has none.

    Args:
        runs: The runs by the name the page gives them.
        summaries: Their numbers, as `summary.summary_of` gives them.
    """
    sft = {name: run.sft for name, run in runs.items() if run.sft}
    align = {name: run.align for name, run in runs.items() if run.align}
    known_sft = {key for chart in _SFT for key in chart.keys}
    known = {key for chart in (_MARGIN, *_ALIGN, *_DENSITY) for key in chart.keys}
    return {
        "kind": _by_kind(runs, summaries),
        "tasks": _differences(runs),
        "confidence": [
            each
            for number, (name, run) in enumerate(runs.items())
            for each in _confidence(run, _of(name, len(runs)), f"-{number}" if number else "")
        ],
        "length": _lengths(runs),
        "sft": _curves("sft", sft, (*_SFT, *_others(sft.values(), known_sft))),
        "margin": _curves("margin", align, (_MARGIN,), height=320),
        "align": _curves("align", align, (*_ALIGN, *_others(align.values(), known))),
        "density": _curves("density", align, _DENSITY),
    }


def pair_shown(run: RecordedRun) -> int | None:
    """The first pair whose rejected side has turns of more than one weight; failing that, the first pair."""
    if not run.pairs:
        return None
    mixed = (i for i, row in enumerate(run.confidence) if len(set(row["rejected"]["weight"])) > 1)
    return next(mixed, 0)


def script_json(text: str) -> Markup:
    """JSON that ends no script element, opens no comment and has no line separators of JavaScript's own."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _by_kind(runs: Mapping[str, RecordedRun], summaries: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """One run: its policies. Several: the last policy of each."""
    table: dict[str, dict[str, Any]] = {}
    names: list[str] = []
    for name, summary in summaries.items():
        policies = [policy["name"] for policy in summary["policies"]]
        for policy in policies if len(runs) == 1 else policies[-1:]:
            label = policy if len(runs) == 1 else f"{name} / {policy}"
            names.append(label)
            for kind, row in summary["by_kind"].items():
                if policy in row:
                    table.setdefault(kind, {})[label] = row[policy]
    return [_figure("kind", Chart("", ()), figures.score_by_kind(table, names))] if names else []


def _differences(runs: Mapping[str, RecordedRun]) -> list[Figure]:
    """Of each run, its last policy against SFT, task by task."""
    drawn = []
    for index, (name, run) in enumerate(runs.items()):
        aligned = aligned_policy(run.evaluation)
        if aligned is None or "sft" not in run.evaluation:
            continue
        a, b = (scores_by_task(run.evaluation[policy]) for policy in (aligned, "sft"))
        title = f"{_of(name, len(runs))}{aligned} less sft, task by task"
        caption = "Each bar is a task; those without a bar tie."
        drawn += _drawn(f"tasks-{index}", Chart(title, (), caption), figures_turns.task_differences(a, b))
    return drawn


def _confidence(run: RecordedRun, of: str, tail: str) -> list[Figure]:
    index = pair_shown(run)
    if index is None or not run.confidence:
        return []
    row, pair = run.confidence[index], run.pairs[index]
    found = []
    for side, trajectory in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        actions = [turn.action.text for turn in trajectory.turns]
        bars = figures_turns.confidence_bars(row[side], actions, run.pivot)
        caption = f"Pair {index + 1}, task {trajectory.task.id}, score {score(trajectory):.2f}.{_pivot(run)}"
        found.append(_figure(f"confidence-{side}{tail}", Chart(f"{of}One {side} episode", (), caption), bars))
    mean = f"Mean of {len(run.pairs)} pairs, 95\u00a0% interval. Fewer episodes reach later turns."
    spread = f"All turns of {len(run.pairs)} pairs.{_pivot(run)}"
    charts = (
        ("all", "Confidence by turn", mean + _pivot(run), _by_turn(run, "confidence", "mean confidence")),
        (
            "spread",
            "Confidence of all turns",
            spread,
            figures_turns.confidence_spread(run.confidence, run.pivot),
        ),
        ("weight", "Weight by turn", mean, _by_turn(run, "weight", "mean weight")),
    )
    for key, title, caption, figure in charts:
        found += _drawn(f"confidence-{key}{tail}", Chart(f"{of}{title}", (), caption), figure)
    return found


def _by_turn(run: RecordedRun, key: str, title: str) -> Any:
    return figures_turns.values_by_turn(
        run.confidence, key, title, run.pivot if key == "confidence" else None
    )


def _lengths(runs: Mapping[str, RecordedRun]) -> list[Figure]:
    found = {
        policy if len(runs) == 1 else f"{name} / {policy}": [
            (len(one.turns), succeeded(one)) for one in items
        ]
        for name, run in runs.items()
        for policy, items in run.evaluation.items()
        if len(runs) == 1 or policy == next(reversed(run.evaluation))
    }
    caption = (
        "Success of evaluated episodes by the turns they took, Wilson intervals. Where the environment ends "
        "an episode on success, short ones are short because they succeeded."
    )
    chart = Chart("Length against success", (), caption)
    return _drawn("length", chart, figures_turns.success_by_length(found))


def _of(name: str, runs: int) -> str:
    return "" if runs == 1 else f"{name}: "


def _pivot(run: RecordedRun) -> str:
    return "" if run.pivot is None else f" The dotted line is the pivot, {run.pivot:g}."


def _curves(
    prefix: str, runs: Mapping[str, Sequence[Row]], charts: Sequence[Chart], height: int = 240
) -> list[Figure]:
    drawn = [(chart, figures.metric_lines(runs, chart, height=height)) for chart in charts] if runs else []
    return [
        each for i, (chart, figure) in enumerate(drawn) for each in _drawn(f"{prefix}-{i}", chart, figure)
    ]


def _others(runs: Iterable[Sequence[Row]], drawn: set[str]) -> Iterator[Chart]:
    """A chart for whatever else was logged, one for each first part of the key."""
    groups: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for rows in runs for row in rows for key in row):
        if key not in drawn | _UNDRAWN:
            groups.setdefault(key.rsplit("/", 1)[0] if "/" in key else key, []).append(key)
    for name, keys in groups.items():
        yield Chart(name.replace("_", " ").capitalize(), tuple(keys))


def _drawn(name: str, chart: Chart, figure: Any) -> list[Figure]:
    return [] if figure is None else [_figure(name, chart, figure)]


def _figure(name: str, chart: Chart, figure: Any) -> Figure:
    return Figure(
        f"figure-{name}", chart.title, chart.caption, figure.layout.height, script_json(to_json(figure))
    )
