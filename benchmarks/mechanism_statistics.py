"""The statistics of `mechanism.py`: where confidence is low, with intervals that know which turns belong together.

Turns of an episode are alike, so are episodes of a task, and so are tasks played by policies of one base. An interval
draws bases again, and within each its tasks, with all their turns; with a single base it draws tasks alone and says
nothing of another base.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Turns:
    """Turns of recorded episodes, one entry each [turns]."""

    base: Ids
    """Number of the base of the policy that played, from 0."""
    task: Ids
    """Number of the task, from 0; a task of two bases may have one number."""
    episode: Ids
    """Number of the episode, from 0."""
    position: Ids
    """Place in its episode, from 0."""
    rejected: Flags
    """Whether the episode is the rejected side of its pair."""
    valid: Flags
    wrong: Flags
    """Whether it came no nearer to the end."""
    away: Flags
    """Whether it led away from the end."""
    confidence: Floats
    """Geometric mean of the reference's probabilities of its tokens, in (0, 1]."""

    def where(self, keep: Flags) -> Turns:
        """Some of the turns."""
        return Turns(**{name: column[keep] for name, column in vars(self).items()})

    @property
    def first(self) -> Flags:
        """Whether it is the first wrong turn of its episode [turns]."""
        order = np.lexsort((self.position, self.episode))
        found = np.zeros(len(order), dtype=bool)
        wrong = order[self.wrong[order]]
        _, places = np.unique(self.episode[wrong], return_index=True)
        found[wrong[places]] = True
        return found

    @property
    def before(self) -> Flags:
        """Whether its episode had no wrong turn yet, this one included [turns]."""
        starts = {
            int(e): int(p) for e, p in zip(self.episode[self.first], self.position[self.first], strict=True)
        }
        pairs = zip(self.episode.tolist(), self.position.tolist(), strict=True)
        return np.array([place < starts.get(episode, place + 1) for episode, place in pairs], dtype=bool)


Statistic = Callable[[Turns, Floats], float]
"""From turns, and how often each counts [turns], to a number; NaN where there is nothing to compute it from."""


def mean_of(chosen: Callable[[Turns], Flags], values: Callable[[Turns], NDArray[np.generic]]) -> Statistic:
    """Mean of a value over the turns of a kind."""

    def statistic(turns: Turns, count: Floats) -> float:
        weight = count * chosen(turns)
        return float(weight @ values(turns).astype(float) / weight.sum()) if weight.sum() else np.nan

    return statistic


def difference(one: Statistic, other: Statistic) -> Statistic:
    """One statistic less another."""
    return lambda turns, count: one(turns, count) - other(turns, count)


def auc(low: Callable[[Turns], Flags], high: Callable[[Turns], Flags]) -> Statistic:
    """Chance that a turn of the first kind has a lower confidence than one of the second; a tie counts half.

        AUC = sum_i sum_j [c_i < c_j] + [c_i = c_j] / 2, over the product of the numbers of turns

    0.5: confidence does not tell them apart. Source: the Mann-Whitney statistic.
    """

    def statistic(turns: Turns, count: Floats) -> float:
        _, place = np.unique(turns.confidence, return_inverse=True)
        lower, higher = (np.bincount(place, count * kind(turns)) for kind in (low, high))
        if not lower.sum() or not higher.sum():
            return np.nan
        above = higher[::-1].cumsum()[::-1] - higher / 2
        return float(lower @ above / (lower.sum() * higher.sum()))

    return statistic


def matched_difference(turns: Turns, count: Floats) -> float:
    """Confidence at first wrong turns less that at right turns of the same position, averaged over the former."""
    first, right = count * turns.first, count * ~turns.wrong
    size = int(turns.position.max()) + 1
    at, total = (np.bincount(turns.position, each, size) for each in (first, first * turns.confidence))
    others, sums = (np.bincount(turns.position, each, size) for each in (right, right * turns.confidence))
    both = (at > 0) & (others > 0)
    if not both.any():
        return np.nan
    gap = total[both] / at[both] - sums[both] / others[both]
    return float(at[both] @ gap / at[both].sum())


def confidence_weights(confidence: Floats, pivot: float = 0.9, low: float = 0.2, high: float = 1.0) -> Floats:
    """Weights of credit `confidence` with the paper's settings [turns]."""
    return np.where(confidence > pivot, low, high)


def uniform_weights(confidence: Floats) -> Floats:
    """The weight 1 [turns]."""
    return np.ones_like(confidence)


def share_on_wrong(weigh: Callable[[Floats], Floats]) -> Statistic:
    """Share of an episode's weight that falls on its wrong turns, averaged over episodes with one at least.

    Weights dealt at random among the turns of an episode would give, on average, that of the uniform weight.
    """

    def statistic(turns: Turns, count: Floats) -> float:
        return _mean_share(turns, count, weigh(turns.confidence))

    return statistic


def _mean_share(turns: Turns, count: Floats, weight: Floats) -> float:
    size = int(turns.episode.max()) + 1
    total, wrong = (np.bincount(turns.episode, each, size) for each in (weight, weight * turns.wrong))
    often = np.zeros(size)
    often[turns.episode] = count
    often *= wrong > 0
    return float(often @ (wrong / np.maximum(total, 1e-300)) / often.sum()) if often.sum() else np.nan


def shuffled_shares(turns: Turns, draws: int, seed: int = 0) -> Floats:
    """`share_on_wrong` of the confidence weights, dealt at random among the turns of each episode [draws]."""
    random = np.random.default_rng(seed)
    weight, count = confidence_weights(turns.confidence), np.ones(len(turns.confidence))
    order = np.argsort(turns.episode, kind="stable")
    found = []
    for _ in range(draws):
        dealt = np.empty_like(weight)
        dealt[order] = weight[np.lexsort((random.random(len(weight)), turns.episode))]
        found.append(_mean_share(turns, count, dealt))
    return np.array(found)


def interval(
    statistic: Statistic, turns: Turns, draws: int = 1000, seed: int = 0
) -> tuple[float, float, float]:
    """A statistic with the 95 % percentile interval of a bootstrap over bases, and over tasks within each."""
    random = np.random.default_rng(seed)
    clusters, place = np.unique(np.stack([turns.base, turns.task]), axis=1, return_inverse=True)
    groups = [np.flatnonzero(clusters[0] == base) for base in np.unique(clusters[0])]
    found = []
    for _ in range(draws):
        chosen = random.integers(len(groups), size=len(groups)) if len(groups) > 1 else [0]
        drawn = np.concatenate([random.choice(groups[each], len(groups[each])) for each in chosen])
        count = np.bincount(drawn, minlength=clusters.shape[1]).astype(float)
        found.append(statistic(turns, count[place.ravel()]))
    low, high = np.nanquantile(found, [0.025, 0.975]) if not np.isnan(found).all() else (np.nan, np.nan)
    return statistic(turns, np.ones(len(turns.confidence))), float(low), float(high)
