"""Weights of a credit in figures, and two credits on the same episodes."""

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
from perturn.stats import Estimate, cluster_interval, rank_correlation, spearman
from perturn.types import Trajectory

SHOWN = 10
"""Turns on which two credits disagree most, that are listed."""
_DIGITS = 9
"""Digits after the point that weights are compared by; smaller differences are rounding error."""


def credit_summary(
    episodes: Sequence[Trajectory], rows: Sequence[CreditRow], failures: str = "leave_out"
) -> dict[str, Any]:
    """Return counts and weights of a credit.

    Args:
        episodes: Every episode that was asked for.
        rows: Their rows, in any order.
        failures: One of `perturn.data.group_account.FAILURES`.

    Returns: JSON data: `counts` as in `counts_of`; `mean` and `spread` (standard deviation) of the weights of trained
        turns, None where there is none; and `by_turn`, the same for each turn number from 1 on, with `n` turns. Those
        that a branch shares are the explored episode's alone.
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
    """Return the turns of an episode; of a branch those that it does not share with the explored one."""
    return range(0 if episode.origin is None else episode.taken_over, len(episode.turns))


def _spread(values: Sequence[float]) -> dict[str, Any]:
    if not values:
        return {"n": 0, "mean": None, "spread": None}
    return {"n": len(values), "mean": float(np.mean(values)), "spread": float(np.std(values))}


@dataclass(frozen=True)
class Disagreement:
    """A turn that one credit ranks high and another low."""

    task: str
    sample: int
    turn: int
    """Number of the turn, from 1."""
    action: str
    weights: tuple[float, float]
    """Of the one credit and the other, without unit."""
    ranks: tuple[float, float]
    """Share of all compared turns below it by each, ties halved, in [0, 1]."""


@dataclass(frozen=True)
class CreditComparison:
    """Two credits on the same episodes; intervals are at 95 % and clustered by task."""

    episodes: int
    """Compared: those that at least one of the two trains."""
    turns: int
    across: Estimate | None
    """Spearman's rank correlation over all turns; None where a credit says the same of all."""
    within: Estimate | None
    """Mean over episodes of the rank correlation over their turns; None where no episode has one."""
    without: int
    """Episodes of two turns or more without one: a credit says the same of all their turns."""
    agreement: Estimate | None
    """Share of turns with the same sign, of those that neither leaves at 0; None where there is none."""
    zero: tuple[int, int]
    """Turns at 0 by the one credit alone, and by the other alone."""
    disagreements: list[Disagreement]
    """Turns whose ranks lie furthest apart, the furthest first."""

    def to_dict(self) -> dict[str, Any]:
        """Return an estimate as JSON data; an end of an interval that the data cannot give is None."""
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
    """Compare two credits turn by turn on the episodes that at least one of them trains.

    Args:
        episodes: The episodes that both have weighed, in any order; for branches, only their own turns are compared.
        one: Rows of a credit.
        other: Rows of another, for the same episodes.
        shown: How many disagreements to list.

    Raises:
        DataError: If an episode has not a row of both with a weight for each of its turns.
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
    """Return a comparison of two credits in words.

    Args:
        found: As `CreditComparison.to_dict` gives it.
        one: Name of the one credit.
        other: Name of the other.
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
    """Return the comparison of a run's first credit with each other credit, in the form that the page reads."""
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
    """Return weights without rounding error, so that equal weights tie and weights without a credit are 0."""
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
    text = episode.turns[t].action.text
    return Disagreement(episode.task.id, episode.sample, t + 1, text, weights, ranks)
