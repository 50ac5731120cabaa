"""Whether the scores of `perturn measure` rank credits as training does, and similarly for two policies.

Both tables are for docs/results/measure.md.

A credit of the online studies on ALFWorld has its gain over RLOO, paired by base, and its scores on the laboratory's
policy. The rank correlation has the interval of Bonett and Wright 2000, "Sample size requirements for estimating
Pearson, Kendall and Spearman correlations", in which the credits are a sample of credits.
"""

import json
from dataclasses import dataclass
from math import atanh, sqrt, tanh
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from scipy.stats import rankdata

from perturn.report.score_headings import HEADINGS, OF_TURNS

STUDIES = ("online", "credits", "groups")
CREDITS = {"ppo": "turn-gae", "reinforce-pp": "reinforce++"}
"""Methods of a study that have another name than their credit."""
SCORES = ("correlation", "lost_auc", "cosine", "expected_cosine", "step_cosine", "signal_to_noise")


@dataclass(frozen=True)
class Gain:
    """Success of a credit less that of RLOO in the same study, in points."""

    study: str
    credit: str
    mean: float
    error: float
    """Standard error, over bases."""


def gains(studies: Path) -> list[Gain]:
    """Return the gains of the credits of the studies."""
    found = []
    for study in STUDIES:
        summary = json.loads((studies / study / "summary.json").read_text(encoding="utf-8"))
        rows = {row["method"]: row for row in summary["environments"]["alfworld"]["methods"]}
        base = np.array(rows["rloo"]["success"]["by_base"])
        for method, row in rows.items():
            points = 100 * (np.array(row["success"]["by_base"]) - base)
            error = float(points.std(ddof=1) / sqrt(len(points)))
            found.append(Gain(study, CREDITS.get(method, method), float(points.mean()), error))
    return found


def rank_correlation(one: list[float], other: list[float], tried: int = 1) -> tuple[float, float, float]:
    """Return Spearman's rank correlation with its 95 % interval, by Bonferroni for so many that are tried at once.

    An end is nan with fewer than five pairs.
    """
    found = float(np.corrcoef(rankdata(one), rankdata(other))[0, 1])
    if len(one) < 5 or not abs(found) < 1:
        return found, float("nan"), float("nan")
    width = NormalDist().inv_cdf(1 - 0.025 / tried) * sqrt((1 + found**2 / 2) / (len(one) - 3))
    return found, tanh(atanh(found) - width), tanh(atanh(found) + width)


def table(measured: dict[str, Any], studies: Path) -> str:
    """Return the rank correlations as Markdown, and what noise of the gains leaves of them."""
    known = measured["credits"]
    all_gains = [each for each in gains(studies) if each.credit in known and each.credit != "rloo"]
    scored = {score: [each for each in all_gains if known[each.credit].get(score)] for score in SCORES}
    scored = {score: own for score, own in scored.items() if len(own) > 2}
    lines = [
        f"| score | credits | rank correlation with the gain | interval for all {len(scored)} scores at once |",
        "|---|---|---|---|",
    ]
    for score, own in scored.items():
        values, gained = [known[each.credit][score][0] for each in own], [each.mean for each in own]
        mean, *alone = rank_correlation(values, gained)
        _, *together = rank_correlation(values, gained, len(scored))
        ends = [f"[{low:+.2f}, {high:+.2f}]" for low, high in (alone, together)]
        lines.append(
            f"| {HEADINGS[score]} | {len(own)} | {mean:+.2f} {ends[0]} | {ends[1]} |".replace("-", "−")
        )
    spread = float(np.var([each.mean for each in all_gains], ddof=1))
    noise = float(np.mean([each.error**2 for each in all_gains]))
    said = ", ".join(f"`{each.credit}` ({each.study}) {each.mean:+.1f}" for each in all_gains)
    lines += [
        "",
        f"Gains over RLOO, in points, {len(all_gains)} credits: {said}.".replace("-0.0", "0.0").replace(
            " -", " −"
        ),
        f"They differ by {sqrt(spread):.1f} points (standard deviation), and each has a standard error of "
        f"{sqrt(noise):.1f} points (root mean square).",
    ]
    return "\n".join(lines)


def agreement(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Return, for each score of turns, the rank correlation over credits between two measurements, as Markdown.

    Credits that give all turns of an episode one number are left out: their scores are nearly equal by construction.
    """
    first, second = one["credits"], other["credits"]
    varying = [name for name in first if all(own.get(name, {}).get("correlation") for own in (first, second))]
    rated = {
        score: [name for name in varying if first[name].get(score) and second[name].get(score)]
        for score in OF_TURNS
    }
    scored = {score: names for score, names in rated.items() if len(names) > 2}
    lines = [
        f"| score | credits | rank correlation between the policies | interval for all {len(scored)} scores at once |",
        "|---|---|---|---|",
    ]
    for score, names in scored.items():
        here, there = ([own[name][score][0] for name in names] for own in (first, second))
        mean, *alone = rank_correlation(here, there)
        _, *together = rank_correlation(here, there, len(scored))
        ends = [f"[{low:+.2f}, {high:+.2f}]" for low, high in (alone, together)]
        lines.append(
            f"| {HEADINGS[score]} | {len(names)} | {mean:+.2f} {ends[0]} | {ends[1]} |".replace("-", "−")
        )
    return "\n".join(lines)
