"""Draw the figures of the report's sections, with their titles and captions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from plotly.io import to_json

from perturn.analysis.iteration_table import unit_of
from perturn.analysis.number_text import ERRORS
from perturn.analysis.run_contents import RecordedRun, Row
from perturn.analysis.run_summary import scores_by_task
from perturn.report import figures
from perturn.report.episode_view import action_text
from perturn.report.figures import Chart, Curve, Line
from perturn.types import has_outcome, score

_SFT = (
    Chart("Loss", ("loss",), "On expert trajectories, in nats a token."),
    Chart("Gradient norm", ("grad_norm",), "Before clipping."),
    Chart("Learning rate", ("learning_rate",)),
)
_MARGIN = Chart(
    "Reward margin",
    ("rewards/margins",),
    "Implicit reward of the chosen side minus the rejected side's, in nats. Compare Figure 3 of the tlm-DRE paper.",
)
_ALIGN = (
    Chart("Loss", ("loss",), "Mean over the pairs or trajectories of a step; its unit is the loss's own."),
    Chart("Rewards", ("rewards/chosen", "rewards/rejected"), "Implicit rewards of the two sides, in nats."),
    Chart(
        "Reward accuracy", ("rewards/accuracies",), "Share of pairs whose chosen side has the higher reward."
    ),
    Chart(
        "Ranking accuracy",
        ("logps/accuracies",),
        "Share of pairs whose chosen side the policy finds likelier.",
    ),
    Chart("Log-probability", ("logps/chosen", "logps/rejected"), "Under the policy, in nats."),
    Chart("Gradient norm", ("grad_norm",), "Before clipping."),
    Chart("Learning rate", ("learning_rate",)),
)
_DENSITY = (
    Chart(
        "Log-ratio",
        ("log_ratio/chosen", "log_ratio/rejected"),
        "How far the policy has moved from its reference, in nats. It starts at 0. If it stays there, training "
        "hardly changed the policy.",
    ),
    Chart(
        "Gradient weight",
        ("gradient_weight/chosen", "gradient_weight/rejected"),
        "How strongly each side pulls, without unit. A side near 0 no longer trains.",
        log=True,
    ),
    Chart(
        "Coefficient",
        ("coefficient",),
        "The factor C of the loss for each chosen side. Near 0, chosen episodes do not train.",
        log=True,
    ),
    Chart(
        "Clamped",
        ("clamped",),
        "Share of log-ratios at their limit. Above 0, the loss differs from its formula.",
    ),
    Chart(
        "Turn weights", ("weight/chosen", "weight/rejected"), "Mean weight of a turn, as the credit wrote it."
    ),
)
_LOGGED = {
    "advantage": ("Advantage", "Mean weight of a turn, by its position, in the unit of the credit."),
    "advantage_spread": ("Spread of the advantage", "Standard deviation of the weights, by position of the turn."),
    "behavior_kl": ("KL to the behavior policy", "k3 of the sampling policy against the policy now, in nats a token."),
    "clip": ("Factor on the clip range", "As the credit wrote it, without unit."),
    "clip_share": ("Clip share", "Share of tokens whose gradient the clip removed."),
    "clipped_away": ("Clipped away", "Ratio times |advantage| where the clip removed the gradient, 0 elsewhere."),
    "effective_batch_size": ("Effective batch size", "Number of pairs that share the pull on the chosen side."),
    "entropy": ("Entropy", "Of the policy, in nats a token."),
    "importance": ("Importance", "Weight of a token for the difference between sampling and training, without unit."),
    "importance_capped": ("Importance at its cap", "Share of tokens."),
    "kl": ("KL", "Of the policy against its reference, in nats: k3 of a token, or of a trajectory with loss kto."),
    "mismatch": ("Engine against training", "k3 between sampling and training, in nats a token."),
    "pair_weight": ("Weight of a pair", "As the loss computes it, without unit."),
    "ratio": ("Ratio", "Probability of a token now over its probability before this training, without unit."),
}  # fmt: skip
"""Title and caption of further logged numbers, by the first part of their key; see docs/methods/logged.md."""


_ITERATIONS = (
    Curve(
        "Turns an episode",
        (Line("explored", "mean_turns", "turns_interval"),),
        "Mean of explored episodes, 95\u00a0% interval.",
    ),
    Curve(
        "Invalid turns",
        (Line("explored", "invalid_rate", "invalid_interval"),),
        "Share of all turns that were explored, 95\u00a0% interval.",
        is_share=True,
    ),
    Curve(
        "Entropy",
        (
            Line("training", "entropy", name="in training"),
            Line("explored", "surprise", name="of sampled tokens"),
        ),
        "In nats a token: of the policy at the tokens that it trains on, and the mean negative log-probability of the "
        "tokens that it sampled. The second estimates the first at temperature 1.",
    ),
    Curve(
        "KL to the reference",
        (Line("training", "kl"),),
        "k3, in nats a token: mean over trained turns.",
    ),
    Curve(
        "Clip share",
        (Line("training", "clip_share"),),
        "Share of tokens whose gradient the clip removed.",
        is_share=True,
    ),
    Curve(
        "Engine against training",
        (Line("training", "mismatch", name="k3"), Line("training", "agreement", name="absolute difference")),
        "Difference between the log-probabilities of sampling and of training, for the same policy, in nats a token. "
        "At rounding error there is nothing to correct.",
    ),
    Curve(
        "Gradient norm", (Line("training", "grad_norm"),), "Before clipping, mean over the optimizer steps."
    ),
)
"""Small curves by iteration."""


@dataclass(frozen=True)
class Figure:
    """One figure of the page."""

    id: str
    title: str
    caption: str
    height: int
    json: Markup
    """Plotly figure as JSON that is safe inside a script element; empty if the caption replaces the figure."""


def sections(
    runs: Mapping[str, RecordedRun], summaries: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[Figure]]:
    """Return the figures of each section, in order; a section without data has no figures.

    Args:
        runs: Contents of the run folders, by display name.
        summaries: Numbers of the runs, as returned by `run_summary.summary_of`.
    """
    base = {name: run.base for name, run in runs.items() if run.base}
    sft = {name: run.sft for name, run in runs.items() if run.sft}
    align = {name: run.align for name, run in runs.items() if run.align}
    return {
        "kind": _by_kind(runs, summaries),
        "passes": _passes(summaries),
        "tasks": _differences(runs),
        "confidence": [
            each
            for number, (name, run) in enumerate(runs.items())
            for each in _confidence(run, _of(name, runs), f"-{number}" if number else "")
        ],
        "length": [*_lengths(runs), *_errors(summaries)],
        "learning": _learning(summaries),
        "iterations": _by_iteration(summaries),
        "ledger": _ledgers(summaries),
        "base": _curves("base", base, (*_SFT, *_others(base, *_SFT))),
        "sft": _curves("sft", sft, (*_SFT, *_others(sft, *_SFT))),
        "margin": _curves("margin", align, (_MARGIN,), height=320),
        "align": _curves("align", align, (*_ALIGN, *_others(align, _MARGIN, *_ALIGN, *_DENSITY))),
        "density": _curves("density", align, _DENSITY),
    }


def script_json(text: str) -> Markup:
    """Escape JSON so that it cannot end a script element, open a comment, or contain JavaScript's line separators."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _by_kind(runs: Mapping[str, RecordedRun], summaries: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """Draw the scores by kind of task: of all policies of a single run, or of the last policy of each run."""
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
    return draw("kind", "", "", figures.score_by_kind(table, names) if names else None)


def _learning(summaries: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """Draw success and mean reward by iteration, with a sentence in place of the reward if both are equal."""
    says = (
        "Line: explored episodes on training tasks, by the policy after so many iterations. Diamonds: evaluations on "
        "held-out tasks. Bands and bars are 95\u00a0% intervals, clustered by task for the line."
    )
    curve = figures.learning_curve(summaries, "success_rate", "success_interval")
    drawn = draw("learning-0", "Success", says, curve)
    explored = [
        row["explored"] for each in summaries.values() for row in each["iterations"] if row["explored"]
    ]
    if drawn and all(abs(row["mean_score"] - row["success_rate"]) < 1e-9 for row in explored):
        return [
            *drawn,
            *draw("learning-1", "Mean reward", "", "An episode's reward is 1 or 0 here: its success."),
        ]
    curve = figures.learning_curve(summaries, "mean_score", "interval")
    return [*drawn, *draw("learning-1", "Mean reward", "As above, the total reward of an episode.", curve)]


def _by_iteration(summaries: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    runs = {name: summary["iterations"] for name, summary in summaries.items() if summary["iterations"]}
    return [
        each
        for i, curve in enumerate(_ITERATIONS)
        for each in draw(f"iteration-{i}", curve.title, curve.caption, figures.iteration_curve(runs, curve))
    ]


def _ledgers(summaries: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """Draw the bins of episodes by iteration, for each run with several iterations."""
    caption = {
        "episodes": "Every episode that was asked for is in one bin; episodes of the lowest bin were trained.",
        "memberships": "An episode is in one group for each of its branching turns. Every membership is in one "
        "bin; memberships of the lowest bin were trained.",
        "steps": "Every step of an explored episode, from one branching turn to the next, is in one bin; "
        "steps of the lowest bin gave a pair.",
        "nodes": "Every state of a tree in which different steps were taken is in one bin; states of the lowest bin "
        "gave a pair.",
    }
    return [
        each
        for i, (name, summary) in enumerate(summaries.items())
        if len(summary["iterations"]) > 1
        for each in draw(
            f"ledger-{i}",
            f"{_of(name, summaries)}Ledger",
            caption[unit_of(summary["iterations"])],
            figures.ledger_bars(summary["iterations"]),
        )
    ]


def _differences(runs: Mapping[str, RecordedRun]) -> list[Figure]:
    """Draw the differences between the last and the first policy by task, for each run."""
    drawn = []
    for index, (name, run) in enumerate(runs.items()):
        if run.compared:
            a, b = (scores_by_task(run.evaluation[policy]) for policy in run.compared)
            title = f"{_of(name, runs)}{run.compared[0]} minus {run.compared[1]}, task by task"
            caption = (
                "Each bar is a task: the difference of its scores. Tasks without a bar have equal scores."
            )
            drawn += draw(f"tasks-{index}", title, caption, figures.task_differences(a, b))
    return drawn


def _confidence(run: RecordedRun, of: str, tail: str) -> list[Figure]:
    rows, pivot = run.confidence, run.pivot
    if not rows:
        return []
    tasks = [each.chosen.task.id for each in run.pairs]
    mixed = (i for i, row in enumerate(rows) if len(set(row["rejected"]["weight"])) > 1)
    index = next(mixed, 0)  # preferably a pair whose rejected turns have several weights
    pair = run.pairs[index]
    dotted = "" if pivot is None else f" The dotted line is the pivot, {pivot:g}."
    mean = f"Mean over {len(rows)} pairs, 95\u00a0% interval, clustered by task. Late turns may rest on one pair."
    drawn = []
    for side, one in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        bars = figures.confidence_bars(
            rows[index][side], [action_text(turn.action) for turn in one.turns], pivot
        )
        scored = f", score {score(one):.2f}" if has_outcome(one) else ""
        shown = f"Pair {index + 1}, task {one.task.id}{scored}.{dotted}"
        drawn += draw(f"confidence-{side}{tail}", f"{of}One {side} episode", shown, bars)
    figure = figures.values_by_turn(rows, tasks, "confidence", "mean confidence", pivot)
    drawn += draw(f"confidence-all{tail}", f"{of}Confidence by turn", mean + dotted, figure)
    figure, caption = figures.confidence_spread(rows, pivot), f"All turns of {len(rows)} pairs.{dotted}"
    drawn += draw(f"confidence-spread{tail}", f"{of}Confidence of all turns", caption, figure)
    figure = figures.values_by_turn(rows, tasks, "weight", "mean weight")
    return drawn + draw(f"confidence-weight{tail}", f"{of}Weight by turn", mean, figure)


def _lengths(runs: Mapping[str, RecordedRun]) -> list[Figure]:
    found = {
        policy if len(runs) == 1 else f"{name} / {policy}": [
            (one.turns, one.success, one.task) for one in items
        ]
        for name, run in runs.items()
        for policy, items in run.evaluation.items()
        if len(runs) == 1 or policy == next(reversed(run.evaluation))
    }
    caption = (
        "Success of evaluated episodes by the turns they took, 95\u00a0% intervals: Wilson's, or clustered by task "
        "where a task has several episodes. Where the environment ends an episode on success, short ones are short "
        "because they succeeded."
    )
    return draw("length", "Length against success", caption, figures.success_by_length(found))


def _passes(summaries: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    caption = (
        "pass@k: the probability that any of k episodes of a task succeeds. pass^k: that all of them succeed. Unbiased "
        "estimates, 95\u00a0% intervals over tasks."
    )
    return draw("passes", "pass@k and pass^k", caption, figures.passes_by_episodes(_last(summaries)))


def _errors(summaries: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    shown = _last(summaries)
    kinds = {row["errors"]["kind"] for row in shown.values() if row.get("errors")}
    caption = (
        f"Share of {' or of '.join(sorted(ERRORS[kind] for kind in kinds))}, by turn: before and after the first such "
        "turn of the episode. 95\u00a0% intervals, clustered by episode. Later turns have fewer episodes."
    )
    return draw("errors", "Errors by turn", caption, figures.errors_by_turn(shown))


def _last(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the rows of all policies of a single run, or of the last policy of each run, by the name that is shown."""
    return {
        row["name"] if len(summaries) == 1 else f"{name} / {row['name']}": row
        for name, summary in summaries.items()
        for row in (summary["policies"] if len(summaries) == 1 else summary["policies"][-1:])
    }


def _of(name: str, runs: Mapping[str, Any]) -> str:
    return "" if len(runs) == 1 else f"{name}: "


def _curves(
    prefix: str, runs: Mapping[str, Sequence[Row]], charts: Iterable[Chart], height: int = 240
) -> list[Figure]:
    return [
        each
        for i, chart in enumerate(charts)
        for each in draw(
            f"{prefix}-{i}", chart.title, chart.caption, figures.metric_lines(runs, chart, height=height)
        )
    ]


def _others(runs: Mapping[str, Sequence[Row]], *charts: Chart) -> Iterator[Chart]:
    """Yield a chart for each further group of logged numbers. The first part of the key names the group."""
    drawn = {"step", "epoch"}.union(*(chart.keys for chart in charts))
    groups: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for rows in runs.values() for row in rows for key in row):
        if key not in drawn:
            groups.setdefault(key.rsplit("/", 1)[0], []).append(key)
    for name, keys in groups.items():
        title, caption = _LOGGED.get(name, (name.replace("_", " ").capitalize(), ""))
        yield Chart(title, tuple(keys), caption)


def draw(name: str, title: str, caption: str, figure: Any) -> list[Figure]:
    """Return a list with a figure, or with a sentence in its place; an empty list if there is nothing to draw."""
    if figure is None:
        return []
    if isinstance(figure, str):
        return [Figure(f"figure-{name}", title, figure, 0, Markup(""))]
    return [Figure(f"figure-{name}", title, caption, figure.layout.height, script_json(to_json(figure)))]
