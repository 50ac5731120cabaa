"""The page of the report: what the templates in `assets/` are given, and how they are filled."""

from __future__ import annotations

import base64
import hashlib
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.io import to_json
from plotly.offline import get_plotlyjs

from turnwise.report import episodes, figures
from turnwise.report.figures import Chart
from turnwise.report.folder import Row, Run, score
from turnwise.stats import Estimate, cluster_interval
from turnwise.types import Status, Trajectory

_ASSETS = Path(__file__).parent / "assets"
_THEMES = {"light": figures.theme("#1f2933", "#dfe3e8"), "dark": figures.theme("#dde2e8", "#3a424d")}

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
        "C of the rejected side, which carries no gradient. Near 0, rejected episodes do not train.",
        log=True,
    ),
    Chart(
        "Clamped", ("clamped",), "Log-ratios that met their limit. Above 0, the loss is not the one written."
    ),
    Chart(
        "High-weight turns",
        ("high_weight_turns/chosen", "high_weight_turns/rejected"),
        "Turns that carry the high weight.",
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


def page(run: Run, summary: Mapping[str, Any]) -> str:
    """Fill the templates.

    Args:
        run: The run folder in memory.
        summary: Its numbers, as `report.summarize` gives them.

    Returns:
        The whole page, which fetches nothing.
    """
    environment = Environment(
        loader=FileSystemLoader(_ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "number": _number,
        "percent": _percent,
        "interval": _interval,
        "time": _time,
        "short": _short,
    }
    library, boot = get_plotlyjs(), (_ASSETS / "boot.js.j2").read_text(encoding="utf-8")
    return environment.get_template("report.html.j2").render(
        name=run.manifest.get("recipe") or run.path.resolve().name,
        notes=run.notes,
        policies=[
            {**row, "invalid_interval": _invalid(run.evaluation[row["name"]])} for row in summary["policies"]
        ],
        sentence=comparison_sentence(summary["comparison"]),
        seconds=summary["seconds"],
        sections=_sections(run, summary),
        episodes=episodes.shown(run),
        data=_data_rows(run),
        counts=_count_rows(run.stages),
        costs=_cost_rows(run.stages),
        protocol=flat(run.protocol or {}),
        provenance=flat({key: value for key, value in run.manifest.items() if key != "stages"}),
        commit=str(run.manifest.get("commit") or ""),
        recipe=run.recipe,
        themes=script_json(json.dumps(_THEMES)),
        library=Markup(library),
        boot=Markup(boot),
        script_hashes=[_hash(library), _hash(boot)],
    )


def comparison_sentence(comparison: Mapping[str, Any] | None) -> str | None:
    """What the paired comparison says, in words; None if there is none."""
    if comparison is None:
        return None
    a, b, n, difference = (comparison[key] for key in ("a", "b", "n", "mean_difference"))
    low, high = comparison["interval"]
    record = f"{comparison['wins']} won, {comparison['losses']} lost, {comparison['ties']} tied"
    facts = (
        f"Task by task, {a} differs from {b} by {difference:+.3f} on average "
        f"(95\u00a0% interval {_signed(low)} to {_signed(high)}; p {_p_value(comparison['p_value'])}; "
        f"{n} {'task' if n == 1 else 'tasks'}: {record})."
    )
    return f"{_verdict(a, b, low, high, comparison['p_value'])} {facts}"


def flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted key, value) rows."""
    rows: list[tuple[str, str]] = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            rows += flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
    return rows


def _verdict(a: str, b: str, low: float | None, high: float | None, p_value: float) -> str:
    if low is not None and low > 0 and p_value < 0.05:
        return f"{a} is better than {b}."
    if high is not None and high < 0 and p_value < 0.05:
        return f"{a} is worse than {b}."
    if low is None or high is None or low <= 0 <= high:
        return f"{a} is not distinguishable from {b}: the interval of the difference contains zero."
    return (
        f"Whether {a} differs from {b} is unclear: the interval leaves zero out, the sign-flip test does not."
    )


def _sections(run: Run, summary: Mapping[str, Any]) -> dict[str, list[Figure]]:
    """Figures of each section, in order; a section without data has none."""
    names = [policy["name"] for policy in summary["policies"]]
    kinds = []
    if names:
        chart = Chart("", ())
        kinds = [_figure("kind", chart, figures.score_by_kind(summary["by_kind"], names))]
    drawn = {key for chart in (_MARGIN, *_ALIGN, *_DENSITY) for key in chart.keys}
    return {
        "kind": kinds,
        "confidence": _confidence(run),
        "sft": _curves(
            "sft", run.sft, (*_SFT, *_others(run.sft, {key for chart in _SFT for key in chart.keys}))
        ),
        "margin": _curves("margin", run.align, (_MARGIN,), height=320),
        "align": _curves("align", run.align, (*_ALIGN, *_others(run.align, drawn))),
        "density": _curves("density", run.align, _DENSITY),
    }


def _confidence(run: Run) -> list[Figure]:
    index = episodes.pair_shown(run)
    if index is None or not run.confidence:
        return []
    row, pair = run.confidence[index], run.pairs[index]
    drawn = []
    for side, trajectory in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        actions = [turn.action.text for turn in trajectory.turns]
        bars = figures.confidence_bars(row[side]["confidence"], row[side]["weight"], actions, run.pivot)
        caption = f"Pair {index + 1}, task {trajectory.task.id}, score {score(trajectory):.2f}.{_pivot(run)}"
        drawn.append(_figure(f"confidence-{side}", Chart(f"One {side} episode", (), caption), bars))
    caption = (
        f"Mean of {len(run.pairs)} pairs, 95\u00a0% interval. Fewer episodes reach later turns.{_pivot(run)}"
    )
    chart = Chart("All pairs, by turn", (), caption)
    return [*drawn, _figure("confidence-all", chart, figures.confidence_by_turn(run.confidence, run.pivot))]


def _pivot(run: Run) -> str:
    return "" if run.pivot is None else f" The dotted line is the pivot, {run.pivot:g}."


def _curves(prefix: str, rows: Sequence[Row], charts: Sequence[Chart], height: int = 240) -> list[Figure]:
    drawn = [(chart, figures.metric_lines(rows, chart, height=height)) for chart in charts]
    return [
        _figure(f"{prefix}-{i}", chart, figure)
        for i, (chart, figure) in enumerate(drawn)
        if figure is not None
    ]


def _others(rows: Sequence[Row], drawn: set[str]) -> Iterator[Chart]:
    """A chart for whatever else was logged, one for each first part of the key."""
    groups: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        if key not in drawn | _UNDRAWN:
            groups.setdefault(key.rsplit("/", 1)[0] if "/" in key else key, []).append(key)
    for name, keys in groups.items():
        yield Chart(name.replace("_", " ").capitalize(), tuple(keys))


def _figure(name: str, chart: Chart, figure: Any) -> Figure:
    return Figure(
        f"figure-{name}", chart.title, chart.caption, figure.layout.height, script_json(to_json(figure))
    )


def script_json(text: str) -> Markup:
    """JSON that ends no script element, opens no comment and has no line separators of JavaScript's own."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def _invalid(trajectories: Sequence[Trajectory]) -> Estimate | None:
    """Share of invalid actions; turns of one trajectory are not independent."""
    turns = [(index, turn) for index, trajectory in enumerate(trajectories) for turn in trajectory.turns]
    if not turns:
        return None
    return cluster_interval([float(not turn.valid) for _, turn in turns], [index for index, _ in turns])


def _data_rows(run: Run) -> list[dict[str, Any]]:
    pairs = run.pairs
    sets = {
        "expert trajectories": run.expert,
        "explored trajectories": run.explored,
        "chosen side of the pairs": [pair.chosen for pair in pairs],
        "rejected side of the pairs": [pair.rejected for pair in pairs],
    }
    return [
        {
            "name": name,
            "n": len(items),
            "tasks": len({item.task.id for item in items}),
            "score": sum(score(item) for item in items) / len(items),
            "success": sum(item.success for item in items) / len(items),
            "turns": sum(len(item.turns) for item in items) / len(items),
            "failed": sum(item.status is Status.FAILED for item in items),
        }
        for name, items in sets.items()
        if items
    ]


def _count_rows(stages: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "stage": name,
            "counts": [(key.replace("_", " "), _count(count)) for key, count in stage["counts"].items()],
        }
        for name, stage in stages.items()
        if stage.get("counts")
    ]


def _cost_rows(stages: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "stage": name,
            "seconds": stage.get("seconds"),
            "memory": stage.get("peak_memory_gb"),
            "tokens": _tokens(stage.get("counts") or {}),
        }
        for name, stage in stages.items()
    ]


def _tokens(counts: Mapping[str, Any]) -> str:
    """Counts of tokens, as the stage named them."""
    found = [(key, count) for key, count in counts.items() if "token" in key and figures.is_number(count)]
    return ", ".join(f"{_count(count)} {key.replace('_', ' ')}" for key, count in found) or "–"


def _count(value: Any) -> str:
    return f"{value:,}" if figures.is_number(value) else str(value)


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}\u00a0%"


def _interval(ends: Sequence[float | None], percent: bool = False) -> str:
    show = (lambda end: "?" if end is None else f"{100 * end:.1f}") if percent else _end
    return f"{show(ends[0])} to {show(ends[1])}"


def _end(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"


def _signed(value: float | None) -> str:
    return "?" if value is None else f"{value:+.3f}"


def _short(value: str) -> str:
    """A hash by its first digits; the whole of it stands under provenance."""
    return f"{value[:12]}…" if len(value) >= 40 and set(value) <= set(string.hexdigits) else value


def _p_value(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.3f}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
