"""Summarize the weights of a credit, and compare two credits on the same episodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

from perturn.analysis.number_text import interval
from perturn.data.group_account import CreditRow, counts_of
from perturn.errors import DataError
from perturn.group import groups_of
from perturn.report.episode_view import action_text
from perturn.stats import Estimate, cluster_interval, rank_correlation, spearman
from perturn.types import Trajectory

SHOWN = 10
"""Number of listed turns on which two credits disagree most."""
_DIGITS = 9
"""Number of decimal places to which weights are compared. Smaller differences are rounding error."""


def credit_summary(
    episodes: Sequence[Trajectory], rows: Sequence[CreditRow], failures: str = "leave_out"
) -> dict[str, Any]:
    """Return the counts and the weights of a credit.

    Args:
        episodes: All episodes that the credit was computed for, including those without a row.
        rows: Rows of the credit for these episodes, in any order.
        failures: One of `perturn.data.group_account.FAILURES`.

    Returns: JSON data. `counts` is described in `counts_of`. `mean` and `spread` (standard deviation) are of the
        weights of trained turns, and None without such a turn. `by_turn` has the same numbers, and the number `n` of
        turns, for each turn number from 1. Turns that a branch shares with its explored episode are counted once.
    """
    trained = {row.key: row.weight for row in rows if row.bin == "trained"}
    own = [(trained[each.key], _own_turns(each)) for each in episodes if each.key in trained]
    longest = max((turns.stop for _, turns in own), default=0)
    columns = [[weight[t] for weight, turns in own if t in turns] for t in range(longest)]
    return {
        "counts": counts_of(groups_of(episodes), rows, failures),
        **_spread([weight[t] for weight, turns in own for t in turns]),
        "by_turn": [{"turn": t, **_spread(values)} for t, values in enumerate(columns, start=1)],
    }


def _own_turns(episode: Trajectory) -> range:
    """Return the turn indices of an episode; for a branch, without the turns shared with its explored episode."""
    return range(0 if episode.origin is None else episode.taken_over, len(episode.turns))


def _spread(values: Sequence[float]) -> dict[str, Any]:
    if not values:
        return {"n": 0, "mean": None, "spread": None}
    return {"n": len(values), "mean": float(np.mean(values)), "spread": float(np.std(values))}


@dataclass(frozen=True)
class Disagreement:
    """A turn that one credit ranks high and the other ranks low."""

    task: str
    sample: int
    turn: int
    """Number of the turn, from 1."""
    action: str
    weights: tuple[float, float]
    """Weights by the first and by the second credit, without unit."""
    ranks: tuple[float, float]
    """Share of all compared turns that each credit ranks below this turn, in [0, 1]. Ties count half."""


@dataclass(frozen=True)
class CreditComparison:
    """Comparison of two credits on the same episodes. Intervals are at 95 % and clustered by task."""

    episodes: int
    """Number of episodes that at least one of the credits trains. Only these are compared."""
    turns: int
    across: Estimate | None
    """Spearman's rank correlation over all turns; None if a credit is constant."""
    within: Estimate | None
    """Rank correlation over the turns of an episode, averaged over episodes; None if it is undefined in all of them."""
    without: int
    """Number of episodes with at least two turns in which a credit is constant, so that they have no correlation."""
    agreement: Estimate | None
    """Share of turns with equal signs, among turns where both credits are nonzero; None without such a turn."""
    zero: tuple[int, int]
    """Number of turns where only the first credit is zero, and where only the second is."""
    disagreements: list[Disagreement]
    """Turns whose ranks differ most, in descending order of the difference."""

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON data, with None for an infinite or undefined end of an interval."""
        found = asdict(self)
        for name in ("across", "within", "agreement"):
            if found[name] is not None:
                ends = {end: found[name][end] for end in ("low", "high")}
                found[name] |= {end: value if math.isfinite(value) else None for end, value in ends.items()}
        return found


def compare_credits(
    episodes: Iterable[Trajectory],
    one: Iterable[CreditRow],
    other: Iterable[CreditRow],
    shown: int = SHOWN,
) -> CreditComparison:
    """Compare two credits turn by turn, on the episodes that at least one of them trains.

    Args:
        episodes: Episodes with weights by both credits, in any order. Only the own turns of branches are compared.
        one: Rows of the first credit.
        other: Rows of the second credit for the same episodes.
        shown: Number of disagreements to list.

    Raises:
        DataError: If an episode lacks a row of either credit, or a row lacks the weight of a turn.
    """
    sides = [{row.key: row for row in rows} for rows in (one, other)]
    compared = [each for each in sorted(episodes, key=lambda each: each.key) if _is_trained(each, sides)]
    pairs = [
        [_rounded([side[each.key].weight[t] for t in _own_turns(each)]) for side in sides]
        for each in compared
    ]
    a, b = ([value for pair in pairs for value in pair[side]] for side in (0, 1))
    tasks = [each.task.id for each in compared for _ in _own_turns(each)]
    return CreditComparison(
        episodes=len(compared),
        turns=len(a),
        across=rank_correlation(a, b, tasks),
        **_within([each.task.id for each in compared], pairs),
        **_signs(a, b, tasks),
        disagreements=_disagreements(compared, a, b, shown),
    )


def sentences(found: Mapping[str, Any], one: str, other: str) -> list[str]:
    """Describe a comparison of two credits in sentences.

    Args:
        found: Comparison returned by `CreditComparison.to_dict`.
        one: Name of the first credit.
        other: Name of the second credit.
    """
    parts = (
        (
            "Rank correlation of the weights over all turns",
            found["across"],
            "one credit gives all turns the same weight",
        ),
        (
            "Rank correlation over the turns of one episode, averaged",
            found["within"],
            "in every episode, at least one credit gives all turns the same weight",
        ),
        ("Share of turns with the same sign", found["agreement"], "no turn has a weight from both credits"),
    )
    said = [
        f"{one} compared with {other}: {found['turns']} turns of {found['episodes']} episodes that at least one of the "
        "two trains."
    ]
    for says, value, otherwise in parts:
        if value is None:
            said.append(f"{says}: none, because {otherwise}.")
        else:
            ends = interval((value["low"], value["high"]))
            said.append(f"{says}: {value['mean']:.3f} {ends} ({value['n']} tasks).")
    left = found["zero"]
    return [*said, f"Turns of weight 0: {left[0]} in {one} alone, {left[1]} in {other} alone."]


def against_own(
    episodes: Sequence[Trajectory], credits: Mapping[str, Sequence[CreditRow]]
) -> list[dict[str, Any]]:
    """Compare a run's own credit with each other credit, in the format that the page reads."""
    first, *others = credits or [""]
    found = []
    for name in others:
        row = compare_credits(episodes, credits[first], credits[name]).to_dict()
        found.append({"names": (first, name), "sentences": sentences(row, first, name), **row})
    return found


def _is_trained(episode: Trajectory, sides: Sequence[Mapping[tuple[str, int], CreditRow]]) -> bool:
    rows = [side.get(episode.key) for side in sides]
    if any(row is None or len(row.weight) != len(episode.turns) for row in rows):
        raise DataError(
            f"task {episode.task.id!r:.80}, sample {episode.sample}: expected a weight for each of its "
            f"{len(episode.turns)} turns in both files of credits. Give both credits again."
        )
    return any(row is not None and row.bin == "trained" for row in rows)


def _rounded(weights: Sequence[float]) -> list[float]:
    """Round weights so that equal weights tie and negligible weights are exactly 0."""
    return [round(each, _DIGITS) + 0.0 for each in weights]


def _within(tasks: Sequence[str], pairs: Sequence[Sequence[Sequence[float]]]) -> dict[str, Any]:
    several = [(task, spearman(*pair)) for task, pair in zip(tasks, pairs, strict=True) if len(pair[0]) > 1]
    found = [(value, task) for task, value in several if value is not None]
    values, clusters = [value for value, _ in found], [task for _, task in found]
    mean = cluster_interval(values, clusters, bounds=(-1.0, 1.0)) if found else None
    return {"within": mean, "without": len(several) - len(found)}


def _signs(a: Sequence[float], b: Sequence[float], tasks: Sequence[str]) -> dict[str, Any]:
    both = [(x, y, task) for x, y, task in zip(a, b, tasks, strict=True) if x and y]
    same = [float((x > 0) == (y > 0)) for x, y, _ in both]
    alone = [sum(1 for x, y in zip(*order, strict=True) if not x and y) for order in ((a, b), (b, a))]
    agreement = cluster_interval(same, [task for *_, task in both]) if both else None
    return {"agreement": agreement, "zero": (alone[0], alone[1])}


def _disagreements(
    episodes: Sequence[Trajectory], a: Sequence[float], b: Sequence[float], shown: int
) -> list[Disagreement]:
    if not a:
        return []
    ranks = [(stats.rankdata(values) - 0.5) / len(values) for values in (a, b)]
    furthest = np.argsort(-np.abs(ranks[0] - ranks[1]), kind="stable")[:shown].tolist()
    turns = [(each, t) for each in episodes for t in _own_turns(each)]
    return [
        _disagreement(*turns[int(i)], (a[i], b[i]), (float(ranks[0][i]), float(ranks[1][i])))
        for i in furthest
    ]


def _disagreement(
    episode: Trajectory, t: int, weights: tuple[float, float], ranks: tuple[float, float]
) -> Disagreement:
    text = action_text(episode.turns[t].action)
    return Disagreement(episode.task.id, episode.sample, t + 1, text, weights, ranks)
