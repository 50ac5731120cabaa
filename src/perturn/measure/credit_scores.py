"""Scores of a credit against measured advantages, corrected for the noise of the measurement.

A measured advantage is the true one plus noise. The continuations are split into two halves with independent noises, so
the product of the halves has the true square as its mean. The square of one measurement would also hold the variance of
the noise. So each score below is a ratio of sums in which the measured advantages stand linearly, or as a product of
the two halves.

Write A for the advantage from all continuations, A1 and A2 for those from halves, c for the credit. Sums run over
turns, means over splits into halves and over which half comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from itertools import pairwise
from math import isinf, sqrt

import numpy as np

from perturn.measure.advantages import Floats, Ids, Measured
from perturn.stats import Estimate, jackknife

Score = Callable[[Measured, Floats], float | None]
"""From measured turns and the credit of each [turns] to a number; None where it is not defined."""

THIRDS = ("early", "middle", "late")
"""Thirds of an episode."""
FEWEST_TASKS = 5
"""Tasks below which episodes are the clusters of an interval."""
_ROUNDING = 1e-12


def correlation(turns: Measured, credit: Floats) -> float | None:
    """Return the correlation within episodes.

        sum c~ A~ / sqrt(sum c~^2  mean sum A1~ A2~),   x~ = x - its mean over the turns of the episode

    None: the credit gives the turns of an episode one number, or the advantages differ no more than their noise.

    Source: Spearman 1904, "The proof and measurement of association between two things", for the correction; the
    reliability is measured by split halves.
    Differs: the credit has no noise of measurement.
    """
    own = _centred(turns, credit)
    one, other = _centred(turns, turns.halves)
    size, spread = float(own @ own), float((one * other).sum(1).mean())
    if size <= _ROUNDING * float(credit @ credit) or spread <= 0:
        return None
    return float(own @ turns.advantage) / sqrt(size * spread)


def error_after_scaling(turns: Measured, credit: Floats) -> float | None:
    """Return the share of the advantages' square that the best multiple of the credit leaves.

        min_s sum (A - s c)^2 / sum A^2 = 1 - mean (sum c A1)(sum c A2) / (sum c^2  mean sum A1 A2)

    Source: Perturn; least squares. 0: the credit is a multiple of the advantage; 1: no multiple is better than 0.
    """
    size, square = float(credit @ credit), float((turns.halves[0] * turns.halves[1]).sum(1).mean())
    if size <= 0 or square <= 0:
        return None
    along = turns.halves @ credit
    return 1 - float((along[0] * along[1]).mean()) / (size * square)


def auc(turns: Measured, credit: Floats) -> float | None:
    """Return the chance that the credit is higher at a turn that gained than at a turn that lost; ties count half.

        AUC = mean sum_ij g_i l_j ([c_i > c_j] + [c_i = c_j] / 2) / mean (sum g)(sum l)
        g = [A1 > 0] A2,   l = -[A1 < 0] A2

    A turn counts by how much it gained or lost, since most turns change next to nothing, and noise decides their sign.
    One half decides whether a turn gains or loses, and the other half gives its size, so a turn that changes nothing
    counts 0 on average. A credit that knows nothing has 0.5.

    Source: Mann and Whitney 1947, "On a test of whether one of two random variables is stochastically larger than the
    other".
    Differs: turns count by their advantage, from another half than their side.
    """
    first, second = _both_orders(turns.halves)
    gained, lost = np.where(first > 0, second, 0.0), -np.where(first < 0, second, 0.0)
    _, rank = np.unique(credit, return_inverse=True)
    size = int(rank.max()) + 1 if len(rank) else 0
    lower = np.stack([np.bincount(rank, own, size) for own in lost]) if size else lost
    below = lower.cumsum(1) - lower / 2
    whole = float((gained.sum(1) * lost.sum(1)).mean())
    if min(whole, float(gained.sum()), float(lost.sum())) <= 0:
        return None
    return float((gained * below[:, rank]).sum(1).mean()) / whole


def sign_errors(turns: Measured, credit: Floats) -> float | None:
    """Return the share of the advantage, by size, at turns that the credit gives the wrong sign; 0 counts half.

        (1 - sum sign(c) A / mean sum sign(A1) A2) / 2

    It is relative to what half of the continuations know: 0 is a credit whose signs are as good as theirs, and a better
    one is below 0. With more continuations, the denominator grows to sum |A|.

    Source: ours. The numerator is linear in A, and the denominator is a product of halves.
    """
    first, second = _both_orders(turns.halves)
    size = float((np.sign(first) * second).sum(1).mean())
    return (1 - float(np.sign(credit) @ turns.advantage) / size) / 2 if size > 0 else None


def lost_auc(turns: Measured, credit: Floats) -> float | None:
    """Return the chance that the credit is lower at the turn that lost an episode than at another of its turns.

    In an episode that did not solve its task, the turn that lost it is the one with the lowest A1. The episode counts
    by -A2 there, the loss that the other continuations confirm. The lowest of many measurements is too low itself
    (regression to the mean), and may be of a turn at which nothing was lost: such an episode counts 0 on average.

    Source: Perturn; the probability is the statistic of Mann and Whitney, within an episode.
    """
    found, whole = 0.0, 0.0
    first, second = _both_orders(turns.halves)
    for start, stop in _failures(turns):
        mine = credit[start:stop]
        lowest = first[:, start:stop].argmin(1)
        loss = -second[np.arange(len(lowest)), start + lowest]
        at = mine[lowest][:, None]
        share = ((at < mine).sum(1) + ((at == mine).sum(1) - 1) / 2) / (len(mine) - 1)
        found += float((loss * share).mean())
        whole += float(loss.mean())
    return found / whole if whole > 0 else None


def loss_found(turns: Measured, credit: Floats) -> float | None:
    """Return the loss at the turns that the credit blames most, as a share of the loss at the turns that lost most.

        sum A at argmin c / mean sum A2 at argmin A1        over episodes that did not solve their task

    Of several lowest turns of an episode, it is their mean.

    Source: ours. Both sides are measured by other continuations than chose the turn.
    """
    found, most = 0.0, 0.0
    first, second = _both_orders(turns.halves)
    for start, stop in _failures(turns):
        mine = credit[start:stop]
        found += float(turns.advantage[start:stop][mine == mine.min()].mean())
        lowest = first[:, start:stop].argmin(1)
        most += float(second[np.arange(len(lowest)), start + lowest].mean())
    return found / most if most < 0 else None


SCORES: Mapping[str, Score] = {
    "correlation": correlation,
    "auc": auc,
    "lost_auc": lost_auc,
    "sign_errors": sign_errors,
    "error_after_scaling": error_after_scaling,
    "loss_found": loss_found,
}
"""Scores by name."""
PROBABILITIES = frozenset({"auc", "lost_auc"})
"""Scores that estimate a probability; see `within_bounds`. The other intervals have no bounds."""


def clusters_of(turns: Measured) -> Ids:
    """Return the cluster of each turn: its task, or its episode where there are few tasks [turns]."""
    return turns.episode if has_few_tasks(turns) else turns.task


def has_few_tasks(turns: Measured) -> bool:
    """Return whether there are fewer than `FEWEST_TASKS` tasks."""
    return len(np.unique(turns.task)) < FEWEST_TASKS


def estimate(name: str, turns: Measured, credit: Floats) -> Estimate | None:
    """Return a score with its 95 % interval, which leaves out tasks in turn."""
    clusters: list[Hashable] = clusters_of(turns).tolist()
    if not clusters:
        return None
    found = jackknife(lambda keep: SCORES[name](turns.where(keep), credit[keep]), clusters)
    return within_bounds(found) if found is not None and name in PROBABILITIES else found


def within_bounds(found: Estimate) -> Estimate:
    """Return an estimate of a probability with both the estimate and its interval inside [0, 1].

    The correction for noise can move an estimate outside of [0, 1]. Such an estimate becomes 0 or 1, and its interval
    moves along. Then the interval is cut at 0 and 1. No probability is farther from the new estimate than from the old
    one. So the new interval contains the true probability whenever the old interval did. If the data gave no interval,
    its infinite ends stay.

    Score and logit intervals also stay inside, but they are not defined for an estimate outside of [0, 1].
    """
    mean = min(1.0, max(0.0, found.mean))
    low, high = (end + mean - found.mean for end in (found.low, found.high))
    if isinf(low):
        return replace(found, mean=mean)
    return replace(found, mean=mean, low=max(0.0, low), high=min(1.0, high))


def scores_of(turns: Measured, credit: Floats) -> dict[str, Estimate | None]:
    """Return all scores of a credit, by name."""
    return {name: estimate(name, turns, credit) for name in SCORES}


def by_third(turns: Measured, credit: Floats) -> dict[str, dict[str, Estimate | None]]:
    """Return all scores of a credit within each third of the episodes."""
    found = {}
    for number, name in enumerate(THIRDS):
        keep = turns.third == number
        found[name] = scores_of(turns.where(keep), credit[keep])
    return found


def _both_orders(halves: Floats) -> tuple[Floats, Floats]:
    """Return each half beside the other half [2 splits, turns]."""
    return np.concatenate([halves[0], halves[1]]), np.concatenate([halves[1], halves[0]])


def _centred(turns: Measured, values: Floats) -> Floats:
    """Return values minus their mean over the turns of the episode [..., turns]."""
    _, number, many = np.unique(turns.episode, return_inverse=True, return_counts=True)
    if not len(number):
        return values
    starts = np.flatnonzero(np.diff(number, prepend=-1))
    means = np.add.reduceat(values, starts, axis=-1) / many
    centred: Floats = values - means[..., number]
    return centred


def _failures(turns: Measured) -> list[tuple[int, int]]:
    """Return first and last turn of each unsolved episode with at least two turns."""
    if not len(turns.episode):
        return []
    edges = [*np.flatnonzero(np.diff(turns.episode, prepend=-1)).tolist(), len(turns.episode)]
    return [(a, b) for a, b in pairwise(edges) if b - a > 1 and not turns.solved[a]]
