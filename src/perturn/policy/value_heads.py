"""Values of turns: linear regressions on the last hidden states of a frozen policy.

V of a turn is predicted from the hidden state that predicts the action's first token. This state depends on everything
before the action, and on nothing of the action. Regressions are cross-fitted: an episode's regression, and its penalty,
are fitted on other episodes alone. Such a V does not depend on the episode's own actions. So V is a baseline that does
not change the expected gradient.
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
"""Number of folds. The regression of a fold is fitted on the episodes of all other folds."""

PENALTIES = (10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-6)
"""Ridge penalties to choose from, relative to the features' total variance; at 10, predictions are near the mean."""

_EQUAL = 1e-9
"""Largest difference of squared errors that counts as rounding, as a share of the sum of squared returns."""
_CONSTANT = 1e-12
"""Variance below which a feature counts as constant, relative to the largest mean square of all features."""


@dataclass(frozen=True)
class ValueHead:
    """A linear predictor on features x: w (x - c) + b."""

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
"""Numbers at the first tokens of each turn, at least one per turn `[trajectories][turns][tokens]`."""


def turn_values(
    model: object, sequences: Sequence[Encoded], targets: ByToken, token_budget: int = TOKEN_BUDGET
) -> list[list[list[float]]]:
    """Return V at the first tokens of each turn, fitted to the returns of other episodes.

    Args:
        model: A causal language model on the device of the computation.
        sequences: Episodes as tokens, with all of their turns; the index of an episode determines its fold.
        targets: Return from each token on at which V is wanted, in units of reward. NaN: the return is unknown, and the
            token is not used for fitting.
        token_budget: Largest number of tokens in one forward pass.

    Returns:
        V at the same tokens, in units of reward; 0 if there is only one episode.
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
    """Return the last hidden states that predict the first tokens of each turn, computed pack by pack.

    Args:
        model: A causal language model on the device of the computation.
        sequences: Episodes as tokens.
        wanted: Number of first tokens of each turn `[trajectories][turns]`.
        token_budget: Largest number of tokens in one forward pass.

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
        model: A causal language model on the device of the computation.
        sequences: Episodes as tokens.
        token_budget: Largest number of tokens in one forward pass.

    Returns:
        One tensor per episode, float32 on the CPU [turns, features].
    """
    with torch.no_grad():
        return pack_by_pack(hidden_states, model, [_behind(one) for one in sequences], token_budget)


def _behind(encoded: Encoded) -> Encoded:
    """Return the episode with loss only on the token after each turn.

    The hidden state that predicts this token depends on the whole turn. One token is appended to each sequence, so that
    a last turn has a token after it.
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
    """Return the episode with loss only on the first tokens of each turn.

    Args:
        encoded: The episode as tokens.
        counts: Number of first tokens of each turn.
    """
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

    Every statistic comes from the other folds alone: mean and deviation of the features, and the penalty. The penalty
    is chosen by cross-validation over these folds.

    Source: cross-fitting as in Chernozhukov et al. 2018, "Double/debiased machine learning", The Econometrics Journal
    21(1).
    Differs: the prediction is a baseline of a policy gradient. By default, folds are episodes and not tasks: given the
    task, its other episodes are independent, and they are the most informative.

    Args:
        features: For each episode, features of at least one row [rows, features].
        targets: For each episode, targets, float64 [rows]; NaN in rows that are not used for fitting.
        folds: Fold of each episode, numbered from 0 without gaps; None: the episode's index modulo `FOLDS`.

    Returns:
        One tensor per episode, float64 [rows]; 0 if there is only one fold, or the other folds have no targets.
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
    """Return a ridge regression fitted on all episodes, for use on new episodes.

    Args:
        features: For each episode, features of at least one row [rows, features].
        targets: For each episode, targets, float64 [rows].
        folds: Folds of the cross-validation that chooses the penalty, as in `cross_fit`.
    """
    folds = _dealt(len(features)) if folds is None else folds
    center = torch.cat(list(features)).mean(0, dtype=torch.float64)
    rows = [
        _rows(own - center, torch.ones_like(target), target)
        for own, target in zip(features, targets, strict=True)
    ]
    moments = _moments(rows, folds)
    head = _fit(_sum(moments), _penalty(moments))
    return ValueHead(center, head[:-2], head[-2])


def cross_fit_sums(features: Sequence[Tensor], targets: Sequence[float]) -> list[Tensor]:
    """Return contributions of an episode's parts that add up to the episode's target, by ridge regression.

        min_(w, b)  mean((sum_t c_t - S)^2) + penalty d mean(T^2) |s w|^2,   c_t = w x_t + b

    This is `cross_fit` with one row per episode: its features are the sums over the T parts, and b is added T times.
    s are the deviations of the d features, taken over the episodes' mean features with weights T^2.

    Args:
        features: For each episode, x of its parts, at least one [parts, features].
        targets: S of each episode.

    Returns:
        Contributions c by the regression of each fold, one tensor per episode, float64 [folds, parts]. With n folds,
        the fold of an episode is its index modulo n. A single episode has one fold, and contributions 0.
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
    """Return the explained variance 1 - var(G - V) / var(G) of returns G, over the first tokens of all turns.

    It is 1 for a perfect V, 0 for a constant V, and negative for a V that is worse than a constant.

    Args:
        values: V, in units of reward.
        targets: G, the return from each token on, in units of reward; turns with NaN are ignored.

    Returns:
        The explained variance, without unit; None if all returns are equal.
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


def _moments(rows: Sequence[Tensor], folds: Sequence[int]) -> list[Tensor]:
    """Return the sum of x x^T over the rows x of each fold, [features + 2, features + 2] per fold."""
    found = []
    for fold in range(max(folds) + 1):
        whole = torch.cat([own for own, its in zip(rows, folds, strict=True) if its == fold])
        found.append(whole.T @ whole)
    return found


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of equal shape."""
    return torch.stack(list(tensors)).sum(0)


def _centered(features: Sequence[Tensor]) -> list[Tensor]:
    """Return features minus their mean over all episodes, float64; no fit changes, and rounding errors shrink."""
    center = torch.cat(list(features)).mean(0, dtype=torch.float64)
    return [own - center for own in features]


def _rows(features: Tensor, constant: Tensor, targets: Tensor) -> Tensor:
    """Return features, the intercept's factor and target as one matrix, float64 [rows, features + 2]."""
    return torch.cat([features, constant.double()[:, None], targets[:, None]], 1)


def folds_by(keys: Sequence[Hashable]) -> list[int]:
    """Return the fold of each key, dealt in order of first occurrence; equal keys are in the same fold."""
    order = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    return [order[key] % min(FOLDS, len(order)) for key in keys]


def _dealt(episodes: int) -> list[int]:
    """Return the default fold of each episode, given the number of episodes."""
    return folds_by(range(episodes))


def _heads(rows: Sequence[Tensor], folds: Sequence[int]) -> list[Tensor]:
    """Return, for each of at least two folds, the coefficients fitted on the other folds [features + 2]."""
    known = [own[own[:, -1].isfinite()] for own in rows]
    moments = _moments(known, folds)
    heads = []
    for fold in range(len(moments)):
        others = [each for each in moments[:fold] + moments[fold + 1 :] if each[-2, -2] > 0]
        heads.append(_fit(_sum(others), _penalty(others)) if others else torch.zeros_like(moments[fold][0]))
    return heads


def _penalty(moments: Sequence[Tensor]) -> float:
    """Return the penalty with the smallest cross-validation error over these folds; for one fold, the largest penalty.

    Errors that differ by less than rounding count as equal, and the first penalty wins. Otherwise the choice could
    change with the order of the episodes, or with other episodes in the same batch.
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
    """Return the cross-validation error: the sum of squared errors in each fold, fitted on the other folds."""
    total = 0.0
    for index, own in enumerate(moments):
        head = _fit(_sum([*moments[:index], *moments[index + 1 :]]), penalty)
        total += float(head @ own @ head)
    return total


def _fit(moments: Tensor, penalty: float) -> Tensor:
    """Return the ridge regression on standardized features; the intercept is not penalized.

        min_w  mean((V - G)^2) + penalty d |s w|^2,   V = w x + b,   s the deviations of the d features

    A row's constant is the factor of b, so V = w x + constant b. For constants other than 1, the same formulas fit x
    and G divided by the constant, and weight the row by the square of its constant.

    Args:
        moments: Z'Z of rows Z = (x, constant, G), float64 [features + 2, features + 2].
        penalty: One of `PENALTIES`.

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
