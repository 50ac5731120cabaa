"""Values of turns: a linear head on the last hidden states of a policy that does not move.

V of a turn is read where its first token is predicted: after everything the policy had seen, and before its action.
Heads are cross-fitted: the head of an episode learns from other episodes alone, also how much to shrink. Such a V does
not depend on the episode's actions, so as a baseline it does not change the expected gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from perturn.chat.tokens import NO_TURN, Encoded
from perturn.config.sections import TOKEN_BUDGET
from perturn.policy.logprobs import hidden_states, pack_by_pack

FOLDS = 5
"""Parts of the episodes, each of which has a head that is fitted on the others."""

PENALTIES = (10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-6)
"""Ridge penalties to choose from, relative to the variance of all features together; 10 leaves little but the mean."""

_EQUAL = 1e-9
"""Largest difference of squared errors, as a share of the sum of squared returns, that counts as rounding error."""
_CONSTANT = 1e-12
"""Variance of a feature, relative to the largest mean square, below which it is a constant."""


@dataclass(frozen=True)
class ValueHead:
    """A number from features: w (x - c) + b."""

    center: Tensor
    """c, float64 [features]."""
    weight: Tensor
    """w, float64 [features]."""
    intercept: Tensor
    """b, in the unit of the predicted value, float64 []."""

    def __call__(self, features: Tensor) -> Tensor:
        """Return the prediction of each row of features [rows, features], float64 [rows]."""
        return (features - self.center) @ self.weight + self.intercept


ByToken = Sequence[Sequence[Sequence[float]]]
"""Numbers at the first tokens of each turn, one or more a turn `[trajectories][turns][tokens]`."""


def turn_values(
    model: object, sequences: Sequence[Encoded], targets: ByToken, token_budget: int = TOKEN_BUDGET
) -> list[list[list[float]]]:
    """Return V at the first tokens of each turn, fitted to the returns of other episodes.

    Args:
        model: A causal language model on the device to compute on.
        sequences: Episodes as tokens, with all of their turns; an episode's part depends on its index.
        targets: The return from a token on, in units of reward, at each token where V is wanted; NaN where it is
            unknown, and the token is not learned.
        token_budget: Tokens of one pass.

    Returns:
        V, in units of reward, where targets are; 0 for an episode that is the only one.
    """
    wanted = [[len(turn) for turn in of_one] for of_one in targets]
    features = turn_features(model, sequences, wanted, token_budget)
    flat = [
        torch.tensor([each for turn in of_one for each in turn], dtype=torch.float64) for of_one in targets
    ]
    found = cross_fit(features, flat)
    return [
        [turn.tolist() for turn in values.split(counts)] for values, counts in zip(found, wanted, strict=True)
    ]


def turn_features(
    model: object,
    sequences: Sequence[Encoded],
    wanted: Sequence[Sequence[int]],
    token_budget: int = TOKEN_BUDGET,
) -> list[Tensor]:
    """Return the last hidden states where the first tokens of each turn are predicted, computed pack by pack.

    Args:
        model: A causal language model on the device to compute on.
        sequences: Episodes as tokens.
        wanted: How many of the first tokens of each turn `[trajectories][turns]`.
        token_budget: Tokens of one pass.

    Returns:
        One tensor per episode, float32 on the CPU [wanted tokens, features].
    """
    carrying = [first_tokens(one, counts) for one, counts in zip(sequences, wanted, strict=True)]
    with torch.no_grad():
        return pack_by_pack(hidden_states, model, carrying, token_budget)


def action_features(
    model: object, sequences: Sequence[Encoded], token_budget: int = TOKEN_BUDGET
) -> list[Tensor]:
    """Return the last hidden states at the last token of each turn's action, computed pack by pack.

    Args:
        model: A causal language model on the device to compute on.
        sequences: Episodes as tokens.
        token_budget: Tokens of one pass.

    Returns:
        One tensor per episode, float32 on the CPU [turns, features].
    """
    with torch.no_grad():
        return pack_by_pack(hidden_states, model, [_behind(one) for one in sequences], token_budget)


def _behind(encoded: Encoded) -> Encoded:
    """Return the episode with loss on the token after each turn alone; the state that predicts it has seen the turn.

    A sequence that ends with a turn has one token more, which no other sees.
    """
    ids: list[int] = []
    behind: list[int] = []
    starts = []
    for span in encoded.sequences:
        starts.append(len(ids))
        ids += [*encoded.ids[span], encoded.ids[span.stop - 1]]
        turns = [*encoded.turn[span], NO_TURN]
        behind += [NO_TURN, *(own if own != after else NO_TURN for own, after in pairwise(turns))]
    return Encoded(tuple(ids), tuple(behind), ("user",) * len(ids), starts=tuple(starts))


def first_tokens(encoded: Encoded, counts: Sequence[int]) -> Encoded:
    """Return the episode with loss on the first tokens of each turn alone."""
    seen: Counter[int] = Counter()
    kept = []
    for turn in encoded.turn:
        kept.append(turn if turn != NO_TURN and seen[turn] < counts[turn] else NO_TURN)
        seen[turn] += 1
    return Encoded(encoded.ids, tuple(kept), encoded.role, starts=encoded.starts)


def cross_fit(
    features: Sequence[Tensor], targets: Sequence[Tensor], folds: Sequence[int] | None = None
) -> list[Tensor]:
    """Return predictions for each episode by ridge regression on the episodes of the other folds.

    Every statistic is of these others alone: the mean and deviation that standardize features, and the penalty, which
    is chosen by leaving out one of their folds after the other.

    Source: cross-fitting as in Chernozhukov et al. 2018, "Double/debiased machine learning", The Econometrics Journal
    21(1).
    Differs: what is predicted is a baseline of a policy gradient. Folds are of episodes, not of tasks: other samples of
    a task are independent given it, and tell the most.

    Args:
        features: Of each episode, at least one row [rows, features].
        targets: Of each episode, float64 [rows]; NaN in rows that are not learned from.
        folds: The fold of each episode, from 0 without a gap; None: its index modulo their number.

    Returns:
        One tensor per episode, float64 [rows]; 0 where there is one episode, or fold, alone, or none to learn
        from.
    """
    folds = _dealt(len(features)) if folds is None else folds
    if len(set(folds)) < 2:
        return [torch.zeros_like(target) for target in targets]
    rows = [
        _rows(own, torch.ones_like(target), target)
        for own, target in zip(_centered(features), targets, strict=True)
    ]
    heads = _heads(rows, folds)
    return [own[:, :-1] @ heads[fold][:-1] for own, fold in zip(rows, folds, strict=True)]


def fit_values(
    features: Sequence[Tensor], targets: Sequence[Tensor], folds: Sequence[int] | None = None
) -> ValueHead:
    """Return a ridge regression on all episodes, for other episodes; folds choose the penalty as in `cross_fit`.

    Args:
        features: Of each episode, at least one row [rows, features].
        targets: Of each episode, float64 [rows].
        folds: As `cross_fit` has them.
    """
    folds = _dealt(len(features)) if folds is None else folds
    center = torch.cat(list(features)).mean(0, dtype=torch.float64)
    rows = [
        _rows(own - center, torch.ones_like(target), target)
        for own, target in zip(features, targets, strict=True)
    ]
    moments = [
        _sum([own.T @ own for own, its in zip(rows, folds, strict=True) if its == fold])
        for fold in range(max(folds) + 1)
    ]
    head = _fit(_sum(moments), _penalty(moments))
    return ValueHead(center, head[:-2], head[-2])


def cross_fit_sums(features: Sequence[Tensor], targets: Sequence[float]) -> list[Tensor]:
    """Return parts that add up to a number of each episode, by ridge regression on the episodes of the other folds.

        min_(w, b)  mean((sum_t c_t - S)^2) + penalty d mean(T^2) |s w|^2,   c_t = w x_t + b

    It is `cross_fit` with one row per episode, whose features are sums, and where b counts as often as there
    are parts, T. s are the deviations of the d features, of the means over an episode's parts, each counted
    T^2 times.

    Args:
        features: x of each part of each episode, at least one [parts, features].
        targets: S of each episode.

    Returns:
        c by the head of each fold, one tensor per episode, float64 [folds, parts]. Of n folds, the fold of an
        episode is its index modulo n. One episode alone has one, and 0.
    """
    if len(features) < 2:
        return [torch.zeros(1, len(own), dtype=torch.float64) for own in features]
    centered = _centered(features)
    rows = [
        _rows(own.sum(0)[None], torch.tensor([float(len(own))]), torch.tensor([target], dtype=torch.float64))
        for own, target in zip(centered, targets, strict=True)
    ]
    heads = torch.stack(_heads(rows, _dealt(len(rows))))
    return [heads[:, :-2] @ own.T + heads[:, -2:-1] for own in centered]


def explained_variance(values: ByToken, targets: ByToken) -> float | None:
    """Share 1 - var(G - V) / var(G) of the variance of returns that V explains, over the first tokens of all turns.

    It is 1 for a perfect V, 0 for a constant and below 0 for a worse one.

    Args:
        values: V, in units of reward.
        targets: G, the return from there on, in units of reward; turns where it is NaN do not count.

    Returns:
        The share, without unit; None where all returns are one number.
    """
    value, target = (
        torch.tensor([turn[0] for of_one in each for turn in of_one], dtype=torch.float64)
        for each in (values, targets)
    )
    known = target.isfinite()
    value, target = value[known], target[known]
    if len(target) == 0 or bool((target == target[0]).all()):
        return None
    return 1 - float((target - value).var(correction=0) / target.var(correction=0))


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape, in their order."""
    return torch.stack(list(tensors)).sum(0)


def _centered(features: Sequence[Tensor]) -> list[Tensor]:
    """Return features less their mean over all episodes, which changes no fit and saves digits, float64."""
    center = torch.cat(list(features)).mean(0, dtype=torch.float64)
    return [own - center for own in features]


def _rows(features: Tensor, constant: Tensor, targets: Tensor) -> Tensor:
    """Return features, intercept factor and target side by side, float64 [rows, features + 2]."""
    return torch.cat([features, constant.double()[:, None], targets[:, None]], 1)


def folds_by(keys: Sequence[Hashable]) -> list[int]:
    """Return the fold of each key, in turn; equal keys are in one fold."""
    order = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    return [order[key] % min(FOLDS, len(order)) for key in keys]


def _dealt(episodes: int) -> list[int]:
    """Return folds of this number of episodes, as indices."""
    return folds_by(range(episodes))


def _heads(rows: Sequence[Tensor], folds: Sequence[int]) -> list[Tensor]:
    """Return for each of at least two folds the head that is fitted on the other folds [features + 2]."""
    known = [own[own[:, -1].isfinite()] for own in rows]
    moments = [
        _sum([own.T @ own for own, its in zip(known, folds, strict=True) if its == fold])
        for fold in range(max(folds) + 1)
    ]
    heads = []
    for fold in range(len(moments)):
        others = [each for each in moments[:fold] + moments[fold + 1 :] if each[-2, -2] > 0]
        heads.append(_fit(_sum(others), _penalty(others)) if others else torch.zeros_like(moments[fold][0]))
    return heads


def _penalty(moments: Sequence[Tensor]) -> float:
    """Return the penalty whose heads predict each of these folds best from the others; of one fold alone, the largest.

    Of equally good ones it is the first. Equal is what differs by rounding alone, which is another one where the same
    episodes lie in another order, or beside other ones: the choice would then depend on more than these folds.
    """
    if len(moments) < 2:
        return PENALTIES[0]
    errors = [_left_out(moments, penalty) for penalty in PENALTIES]
    size = float(_sum(moments)[-1, -1])
    return next(
        penalty
        for penalty, error in zip(PENALTIES, errors, strict=True)
        if error <= min(errors) + _EQUAL * size
    )


def _left_out(moments: Sequence[Tensor], penalty: float) -> float:
    """Return the sum of squared errors in each fold of a head that is fitted on the others."""
    total = 0.0
    for index, own in enumerate(moments):
        head = _fit(_sum([*moments[:index], *moments[index + 1 :]]), penalty)
        total += float(head @ own @ head)
    return total


def _fit(moments: Tensor, penalty: float) -> Tensor:
    """Return ridge regression on standardized features, with an intercept that is not shrunk.

        min_w  mean((V - G)^2) + penalty d |s w|^2,   V = w x + b,   s the deviations of the d features

    Where rows have another constant than 1, V = w x + constant b: the same formulas fit x and G over the constant, with
    its square as a row's weight.

    Args:
        moments: Z'Z of rows Z = (x, constant, G), float64 [features + 2, features + 2].
        penalty: One of PENALTIES.

    Returns:
        w, b and -1, whose product with a row is V - G [features + 2].
    """
    mean = moments[-2] / moments[-2, -2]
    covariance = moments / moments[-2, -2] - torch.outer(mean, mean)
    variance = covariance.diagonal()[:-2]
    varies = variance > _CONSTANT * (variance + mean[:-2].square()).max()
    inverse = torch.where(varies, torch.where(varies, variance, 1.0).rsqrt(), 0.0)
    scaled = covariance[:-2, :-2] * torch.outer(inverse, inverse)
    scaled.diagonal().add_(penalty * len(inverse))
    aim = (covariance[:-2, -1] * inverse)[:, None]
    weight = torch.cholesky_solve(aim, torch.linalg.cholesky(scaled))[:, 0] * inverse
    intercept = mean[-1] - weight @ mean[:-2]
    return torch.cat([weight, torch.stack([intercept, -torch.ones_like(intercept)])])
