"""Score a credit against measured advantages, corrected for the noise of the measurement.

A measured advantage is the true advantage plus noise. Its square is too large on average, by the variance of the noise.
The continuations are therefore split into two halves with independent noise. The product of the two halves has the true
square as its expected value. Each score below is a ratio of sums that are linear in the measured advantages, or contain
products of the two halves.

Notation: A is the advantage from all continuations, A1 and A2 are the advantages from the two halves, and c is the
credit. Sums run over turns. Means run over the random splits, and over the two orders of the halves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from itertools import pairwise
from math import isinf, sqrt

import numpy as np

from perturn.measure.advantages import Flags, Floats, Ids, Measured
from perturn.stats import Estimate, jackknife

Statistic = Callable[[Flags], float | None]
"""Function from a mask [turns], which keeps or drops whole episodes, to the score of the kept turns. The score is None
if it is undefined."""
Score = Callable[[Measured, Floats], Statistic]
"""Function from measured turns and their credit [turns] to a statistic."""

THIRDS = ("early", "middle", "late")
"""Thirds of an episode."""
FEWEST_TASKS = 5
"""Number of tasks below which intervals are clustered by episode instead of by task."""
_ROUNDING = 1e-12


def _recomputed(score: Callable[[Measured, Floats], float | None]) -> Score:
    """Return a score that is computed from the kept turns anew for each mask."""

    @wraps(score)
    def statistic(turns: Measured, credit: Floats) -> Statistic:
        return lambda keep: score(turns.where(keep), credit[keep])

    return statistic


def correlation(turns: Measured, credit: Floats) -> Statistic:
    """Return the correlation of credit and advantage within episodes.

        sum c~ A~ / sqrt(sum c~^2  mean sum A1~ A2~),   x~ = x - (mean of x over the turns of the episode)

    The score is None if the credit is constant within every episode, or if the advantages vary no more than their
    noise.

    Source: Spearman 1904, "The proof and measurement of association between two things", for the correction; the
    reliability is measured by split halves.
    Differs: only the advantage is corrected, since the credit has no measurement noise.
    """
    own = _centred(turns, credit)
    one, other = _centred(turns, turns.halves)
    terms = np.stack([own * turns.advantage, own**2, (one * other).mean(0), credit**2])

    def of(keep: Flags) -> float | None:
        along, size, spread, square = terms[:, keep].sum(1).tolist()
        return None if size <= _ROUNDING * square or spread <= 0 else along / sqrt(size * spread)

    return of


@_recomputed
def error_after_scaling(turns: Measured, credit: Floats) -> float | None:
    """Return the share of the squared advantage that remains after subtracting the best multiple of the credit.

        min_s sum (A - s c)^2 / sum A^2 = 1 - mean (sum c A1)(sum c A2) / (sum c^2  mean sum A1 A2)

    At 0, the advantage is a multiple of the credit. At 1, no multiple of the credit is better than 0.
    """
    size, square = float(credit @ credit), float((turns.halves[0] * turns.halves[1]).sum(1).mean())
    if size <= 0 or square <= 0:
        return None
    along = turns.halves @ credit
    return 1 - float((along[0] * along[1]).mean()) / (size * square)


@_recomputed
def auc(turns: Measured, credit: Floats) -> float | None:
    """Return the probability that the credit is higher at a turn that gained than at a turn that lost. Ties count half.

        AUC = mean sum_ij g_i l_j ([c_i > c_j] + [c_i = c_j] / 2) / mean (sum g)(sum l)
        g = [A1 > 0] A2,   l = -[A1 < 0] A2

    Most turns change almost nothing, and noise decides their sign. So each turn is weighted by the size of its gain or
    loss. One half of the continuations decides the sign, and the other half gives the size. A turn that changes nothing
    then has weight 0 on average. An uninformative credit scores 0.5.

    Source: Mann and Whitney 1947, "On a test of whether one of two random variables is stochastically larger than the
    other". Differs: turns are weighted by their advantage. One half of the continuations measures the advantage, and
    the other half measures its sign.
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


@_recomputed
def sign_errors(turns: Measured, credit: Floats) -> float | None:
    """Return the share of the absolute advantage at turns where the credit has the wrong sign; a zero counts half.

        (1 - sum sign(c) A / mean sum sign(A1) A2) / 2

    The score compares the credit with one half of the continuations. It is 0 if the signs of the credit are as good as
    the signs from that half, below 0 if they are better, and 0.5 at chance. With more continuations, the denominator
    approaches sum |A|, and the score the share.

    Source: Perturn. The numerator is linear in A, and the denominator is a product of halves.
    """
    first, second = _both_orders(turns.halves)
    size = float((np.sign(first) * second).sum(1).mean())
    return (1 - float(np.sign(credit) @ turns.advantage) / size) / 2 if size > 0 else None


def lost_auc(turns: Measured, credit: Floats) -> Statistic:
    """Return the probability that the credit is lower at the turn that lost an episode than at another of its turns.

    If an episode did not solve its task, the turn with the lowest A1 is taken as the turn that lost it. The episode has
    the weight -A2 at that turn, the loss that the other half of the continuations measures. The lowest of many
    measurements is biased downwards (regression to the mean), even if no turn lost anything. Such an episode has weight
    0 on average.

    Source: Perturn. The probability is the statistic of Mann and Whitney within an episode.
    """
    found = {}
    for start, stop, lowest, loss in _losses(turns):
        mine = credit[start:stop]
        at = mine[lowest][:, None]
        share = ((at < mine).sum(1) + ((at == mine).sum(1) - 1) / 2) / (len(mine) - 1)
        found[start] = float((loss * share).mean()), float(loss.mean())
    return _ratio(found)


def loss_found(turns: Measured, credit: Floats) -> Statistic:
    """Return the loss at the turns that the credit blames most, relative to the largest losses of the episodes.

        sum A at argmin c / mean sum A2 at argmin A1        over episodes that did not solve their task

    If the lowest credit of an episode is shared by several turns, their mean advantage is used. The value is 1 for a
    credit that chooses turns as well as half of the continuations does, and above 1 for a better credit.

    Source: Perturn. In the numerator the credit chooses the turn. In the denominator one half of the continuations
    chooses it, and the other half measures the loss.
    """
    found = {}
    for start, stop, _, loss in _losses(turns):
        mine = credit[start:stop]
        blamed = turns.advantage[start:stop][mine == mine.min()]
        found[start] = -float(blamed.mean()), float(loss.mean())
    return _ratio(found)


SCORES: Mapping[str, Score] = {
    "correlation": correlation,
    "auc": auc,
    "lost_auc": lost_auc,
    "sign_errors": sign_errors,
    "error_after_scaling": error_after_scaling,
    "loss_found": loss_found,
}
"""Score functions by name."""
BOUNDS: Mapping[str, tuple[float, float]] = {
    "correlation": (-1.0, 1.0),
    "auc": (0.0, 1.0),
    "lost_auc": (0.0, 1.0),
    "error_after_scaling": (0.0, 1.0),
}
"""Lowest and highest true value of a score; see `within_bounds`. The other scores are unbounded."""


def clusters_of(turns: Measured) -> Ids:
    """Return the cluster of each turn: its task, or its episode if there are few tasks [turns]."""
    return turns.episode if has_few_tasks(turns) else turns.task


def has_few_tasks(turns: Measured) -> bool:
    """Return whether there are fewer than `FEWEST_TASKS` tasks."""
    return len(np.unique(turns.task)) < FEWEST_TASKS


def estimate(name: str, turns: Measured, credit: Floats) -> Estimate | None:
    """Return a score with its 95 % interval, from a jackknife over tasks (or over episodes if tasks are few).

    A credit that is constant within each episode cannot tell the turns of an episode apart. Its `lost_auc` is 0.5
    without error, so both ends of the interval are 0.5.
    """
    clusters: list[Hashable] = clusters_of(turns).tolist()
    if not clusters:
        return None
    found = jackknife(SCORES[name](turns, credit), clusters)
    if found is not None and name == "lost_auc" and _is_constant(turns, credit):
        return replace(found, low=found.mean, high=found.mean)
    return None if found is None else within_bounds(found, BOUNDS.get(name))


def within_bounds(found: Estimate, bounds: tuple[float, float] | None) -> Estimate:
    """Move an estimate and its interval into the range of the true value.

    The correction for noise can move an estimate outside the range. Such an estimate moves to the nearest bound, and
    its interval moves by the same distance. Then the interval is cut at the bounds. Every value of the range is at
    least as near to the new estimate as to the old estimate. So the new interval contains the true value whenever the
    old interval did. An infinite interval stays infinite.

    Score and logit intervals of a probability would also stay inside [0, 1], but they are undefined for an estimate
    outside it.

    Args:
        found: An estimate with its interval.
        bounds: Lowest and highest possible true value; None if it is unbounded.
    """
    if bounds is None:
        return found
    mean = min(bounds[1], max(bounds[0], found.mean))
    low, high = (end + mean - found.mean for end in (found.low, found.high))
    if isinf(low):
        return replace(found, mean=mean)
    return replace(found, mean=mean, low=max(bounds[0], low), high=min(bounds[1], high))


def _is_constant(turns: Measured, credit: Floats) -> bool:
    """Return whether a credit is equal for all turns of each episode, up to rounding."""
    own = _centred(turns, credit)
    return bool(own @ own <= _ROUNDING * float(credit @ credit))


def scores_of(turns: Measured, credit: Floats) -> dict[str, Estimate | None]:
    """Return all scores of a credit, by name."""
    return {name: estimate(name, turns, credit) for name in SCORES}


def by_third(turns: Measured, credit: Floats) -> dict[str, dict[str, Estimate | None]]:
    """Return all scores of a credit for each third of the episodes. Episodes of one or two turns are left out."""
    found = {}
    for number, name in enumerate(THIRDS):
        keep = (turns.third == number) & (turns.length >= len(THIRDS))
        found[name] = scores_of(turns.where(keep), credit[keep])
    return found


def _both_orders(halves: Floats) -> tuple[Floats, Floats]:
    """Return both halves in both orders, as two arrays [2 splits, turns]."""
    return np.concatenate([halves[0], halves[1]]), np.concatenate([halves[1], halves[0]])


def _centred(turns: Measured, values: Floats) -> Floats:
    """Return values minus their mean over the turns of each episode [..., turns]."""
    _, number, many = np.unique(turns.episode, return_inverse=True, return_counts=True)
    if not len(number):
        return values
    starts = np.flatnonzero(np.diff(number, prepend=-1))
    means = np.add.reduceat(values, starts, axis=-1) / many
    centred: Floats = values - means[..., number]
    return centred


def _failures(turns: Measured) -> list[tuple[int, int]]:
    """Return the start and the end (exclusive) of the turns of each unsolved episode with at least two turns."""
    if not len(turns.episode):
        return []
    edges = [*np.flatnonzero(np.diff(turns.episode, prepend=-1)).tolist(), len(turns.episode)]
    return [(a, b) for a, b in pairwise(edges) if b - a > 1 and not turns.solved[a]]


def _losses(turns: Measured) -> Iterator[tuple[int, int, Ids, Floats]]:
    """Yield the start and the end of each episode of `_failures`, with its turn of lowest A1 and the loss -A2 there.

    The last two have an entry for each split, in both orders of the halves [2 splits].
    """
    first, second = _both_orders(turns.halves)
    for start, stop in _failures(turns):
        lowest = first[:, start:stop].argmin(1)
        yield start, stop, lowest, -second[np.arange(len(lowest)), start + lowest]


def _ratio(terms: Mapping[int, tuple[float, float]]) -> Statistic:
    """Return the statistic that divides two sums over episodes, whose terms are given by the episode's first turn."""

    def of(keep: Flags) -> float | None:
        kept = [each for start, each in terms.items() if keep[start]]
        found, whole = (sum(column) for column in zip(*kept, strict=True)) if kept else (0.0, 0.0)
        return found / whole if whole > 0 else None

    return of
