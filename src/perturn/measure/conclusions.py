"""Describe the result of a measurement in sentences. Each sentence appears only if its interval supports it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MARGIN = 0.05
"""Maximum distance from 0.5 of an AUC's interval ends for the verdict `no better than chance`."""
_UNCORRELATED = 0.1
"""Upper limit of the correlation's interval for the same verdict. Noise alone can move an AUC to 0.5, but not the
correlation below this limit."""


def sentences(name: str, row: Mapping[str, Any], environment: str) -> list[str]:
    """Return the sentences that a measurement supports for a credit.

    Args:
        name: Name of the credit.
        row: Scores of the credit by name, each [mean, low, high] or None.
        environment: Name of the environment.
    """
    return [f"On {environment}, {name} {claim}." for claim in _claims(row)]


def unscored(rows: Iterable[Mapping[str, Any]], names: Iterable[str]) -> str:
    """Return why no credit has a score with an interval, and the remedy; an empty text if a credit has one.

    Args:
        rows: Scores of each credit by name, each [mean, low, high] or None.
        names: Names of the scores that compare turns.
    """
    wanted = tuple(names)
    scores = [row[name] for row in rows for name in wanted if row.get(name)]
    if any(None not in score and score[1] < score[2] for score in scores):
        return ""
    if scores:
        return (
            "No score has an interval: without some of the tasks, the measured advantages differ no more than their "
            "noise. Measure more --episodes, of more tasks, or play more --continuations."
        )
    return (
        "No credit has a score: the measured advantages differ no more than their noise. If few continuations earn a "
        "reward, explore easier tasks, explore with a stronger policy, or reward partial success. Otherwise measure "
        "more --episodes, or play more --continuations."
    )


def _claims(row: Mapping[str, Any]) -> Iterator[str]:
    correlation, cosine = row.get("correlation"), row.get("expected_cosine")
    if claim := _of_chance(row.get("lost_auc"), correlation):
        yield f"finds the turn that lost an episode {claim}"
    if claim := _of_chance(row.get("auc"), correlation):
        yield f"tells turns that gain from turns that lose {claim}"
    if correlation and correlation[1] is not None and correlation[1] > 0:
        yield f"ranks the turns of an episode like their advantage (correlation {_said(correlation)})"
    if _is_below_zero(correlation):
        yield f"ranks the turns of an episode against their advantage (correlation {_said(correlation)})"
    if _is_below_zero(cosine):
        yield f"points its expected gradient away from the true one (cosine {_said(cosine)})"


def _of_chance(estimate: Any, correlation: Any) -> str:
    """Return the verdict on an AUC; empty if the interval contains both 0.5 and values clearly different from it.

    It is also empty if the ends are equal: a credit that is constant within each episode has an AUC of exactly 0.5,
    which no measurement has to show.
    """
    if not estimate or None in estimate or estimate[1] == estimate[2]:
        return ""
    _, low, high = estimate
    if low > 0.5:
        return f"better than chance (AUC {_said(estimate)})"
    if high < 0.5:
        return f"worse than chance (AUC {_said(estimate)})"
    known = bool(correlation) and None not in correlation and correlation[2] < _UNCORRELATED
    if low > 0.5 - MARGIN and high < 0.5 + MARGIN and known:
        return f"no better than chance (AUC {_said(estimate)})"
    return ""


def _is_below_zero(estimate: Any) -> bool:
    return bool(estimate) and estimate[2] is not None and estimate[2] < 0


def _said(estimate: Any) -> str:
    mean, low, high = estimate
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"
