"""Measure the agreement of a recipe's judge with labels from a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any, NotRequired

from typing_extensions import TypedDict

from perturn.config.recipe import Recipe
from perturn.config.reward_settings import JudgeSettings
from perturn.data.run_folder import run_folder
from perturn.data.run_paths import RunPaths
from perturn.engines.judging.judge import Judgment, Question
from perturn.engines.judging.judge_questions import question, questions
from perturn.envs.json_rows import read_rows
from perturn.errors import DataError, required
from perturn.formats.read_rows import read_row
from perturn.io.read_input import check_shape
from perturn.run.judging.judged_rewards import open_judge
from perturn.stats import Estimate, cluster_interval, kappa, rank_correlation, rate_interval
from perturn.types import Trajectory

_HALF = 0.5
"""A rating agrees with a label if they differ by less than this."""


class _Row(TypedDict):
    label: float
    text: NotRequired[str]
    episode: NotRequired[dict[str, Any]]
    turn: NotRequired[int]


@dataclass(frozen=True)
class Labeled:
    """An item with a label by a person."""

    question: Question
    label: float
    unit: str
    """Key of the labelled episode or text. Labels of one episode are correlated. Episodes with equal content have one
    key, and each text has its own."""


def measure_agreement(recipe: Recipe, file: Path) -> dict[str, Any]:
    """Return the agreement of a judge with labels, as JSON data. Undefined estimates are null.

    Intervals are clustered by episode, since labels on turns of one episode are correlated. `n` is the number of
    episodes and texts. Episodes with equal content count as one.

    - `agreement`: fraction of the ratings that differ from their label by less than 0.5;
    - `kappa`: Cohen's kappa with quadratic weights; `rank_correlation`: Spearman's rank correlation; - `bias`: mean of
    rating minus label; `error`: root mean square of rating minus label; - `noise`: pooled standard deviation of an
    item's ratings; null for one rating per item.

    Args:
        recipe: A recipe with a judge.
        file: JSON lines with a `label`, and either a `text` or an `episode`. An episode may have a `turn`, the index of
            the rated turn.

    Raises:
        ConfigError: If the recipe has no judge.
        DataError: If a row is malformed, or a label is outside the judge's scale.
    """
    remedy = "set it, such as reward.judge={model: m, rubric: r}"
    settings = required(recipe.judge, "reward.judge", "its ratings are compared with labels", remedy)
    items = list(_read(file, settings))
    folder = RunPaths(run_folder(recipe))
    with open_judge(settings, folder.judge if folder.is_run else None) as judge:
        judgments = judge.rate([each.question for each in items])
    return {"judge": asdict(settings), "file": str(file)} | _figures(items, judgments)


def _figures(items: Sequence[Labeled], judgments: Sequence[Judgment]) -> dict[str, Any]:
    read = [(fmean(found.ratings), one) for one, found in zip(items, judgments, strict=True) if found.ratings]
    rates, labels = [rate for rate, _ in read], [one.label for _, one in read]
    differences = [rate - label for rate, label in zip(rates, labels, strict=True)]
    units = [one.unit for _, one in read]
    several = [found.ratings for found in judgments if len(found.ratings) > 1]
    counts = {
        "items": len(items),
        "rated": len(read),
        "judgments": sum(len(each.ratings) + len(each.problems) for each in judgments),
        "unreadable": sum(len(each.problems) for each in judgments),
    }
    if not read:
        return counts
    agree = [abs(each) < _HALF for each in differences]
    independent = len(set(units)) == len(units)
    return counts | {
        "agreement": _row(
            rate_interval(sum(agree), len(read)) if independent else cluster_interval(agree, units)
        ),
        "kappa": _row(rank_correlation(rates, labels, units, statistic=kappa)),
        "rank_correlation": _row(rank_correlation(rates, labels, units)),
        "bias": _row(cluster_interval(differences, units, bounds=None)),
        "error": math.sqrt(fmean(each**2 for each in differences)),
        "noise": _pooled(several) if several else None,
    }


def _pooled(groups: Sequence[Sequence[float]]) -> float:
    """Return the pooled standard deviation of groups of at least two ratings each."""
    squares = sum(len(group) * pvariance(group) for group in groups)
    return math.sqrt(squares / sum(len(group) - 1 for group in groups))


def _row(found: Estimate | None) -> dict[str, Any] | None:
    """Return an estimate as JSON data. An end of its interval that is not finite is null."""
    if found is None:
        return None
    ends = [end if math.isfinite(end) else None for end in (found.low, found.high)]
    return {"mean": found.mean, "interval": ends, "n": found.n}


def _read(file: Path, settings: JudgeSettings) -> Iterator[Labeled]:
    """Yield the labelled items of a file."""
    low, high = settings.scale
    for number, (where, row) in enumerate(read_rows(file)):
        check_shape(row, _Row, where, DataError)
        if not low <= row["label"] <= high:
            raise DataError(
                f"{where}: label must lie on reward.judge.scale, from {low:g} to {high:g}, got {row['label']:g}."
            )
        if ("text" in row) == ("episode" in row):
            raise DataError(f"{where}: expected either text or episode beside label; leave one of them out.")
        unit = json.dumps(row["episode"], sort_keys=True) if "episode" in row else str(number)
        yield Labeled(_question(row, where, number, settings), float(row["label"]), unit)


def _question(row: dict[str, Any], where: str, number: int, settings: JudgeSettings) -> Question:
    rubric, scale = settings.rubric, settings.scale
    if "text" in row:
        return question(row["text"], rubric, scale, "episode", f"item {number}")
    try:
        episode = read_row(row["episode"], number)
    except DataError as error:
        raise DataError(f"{where}: episode: {error}") from error
    if not isinstance(episode, Trajectory) or not episode.turns:
        raise DataError(f"{where}: episode must be a trajectory or a conversation with messages.")
    asked = questions(episode, rubric, scale, "episode" if row.get("turn") is None else "turn")
    turn: int = row.get("turn") or 0
    if not 0 <= turn < len(asked):
        raise DataError(f"{where}: turn must be from 0 to {len(asked) - 1}, got {turn}.")
    return asked[turn]
