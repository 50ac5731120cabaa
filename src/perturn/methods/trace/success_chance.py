"""Quantity `success-chance`: how likely an episode is to succeed from each of its turns, as a predictor has it.

The predictor is a linear head on the last hidden states of the policy that explored, fitted on other episodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from perturn.extend import Need, Trajectory, succeeded
from perturn.extend.quantity_tools import (
    ACTED,
    Computed,
    Ground,
    Quantity,
    QuantityTraits,
    Reader,
    Source,
    cross_fit,
    encoded,
    explained_variance,
    folds_by,
    frozen,
    turn_features,
)
from perturn.methods.trace.mixed_branches import SuccessChance


@dataclass(frozen=True)
class Chances:
    """Predicted chances of a success before each turn of an episode."""

    own: Sequence[float] = ()
    """By the head of the episode's fold, which learned from all other folds, between 0 and 1 [turns]."""
    fold: int | None = None
    """Fold of the episode; None: it has no turns."""
    without: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """By the head that learned neither from the episode's fold nor from another fold, by the number of that fold."""


@dataclass(frozen=True)
class Prospects:
    """Chances of a success before each turn of some episodes, as others tell of them."""

    own: list[list[float]]
    """By the head of the episode's fold, which learned from all other folds, between 0 and 1 `[episodes][turns]`."""
    rivals: list[dict[int, list[float]]]
    """Of each fold, the episodes of the other folds by their index: each by a head that learned from the rest of these,
    so that nothing here depends on the fold `[folds][episodes][turns]`."""


def chances_of(trajectories: Sequence[Trajectory], others: str, reader: Reader) -> list[Chances]:
    """Return the predicted chances of each episode.

    Args:
        trajectories: Episodes, in any order.
        others: As `SuccessChance.others`.
        reader: The policy.
    """
    rows = encoded(trajectories, reader.renderer)
    sequences = [row.chosen for row in rows.values()]
    with frozen(reader.model):
        features = turn_features(
            reader.model, sequences, [[1] * one.turns for one in sequences], reader.token_budget
        )
    played = [trajectories[index] for index in rows]
    outcomes = [
        torch.full((len(own),), float(succeeded(one)), dtype=torch.float64)
        for one, own in zip(played, features, strict=True)
    ]
    folds = folds_of(played, others)
    found = dict(zip(rows, told(prospects(features, outcomes, folds), folds), strict=True))
    return [found.get(index, Chances()) for index in range(len(trajectories))]


def told(found: Prospects, folds: Sequence[int]) -> list[Chances]:
    """Return a prediction for each episode from the predictions for each fold."""
    return [
        Chances(own, fold, {other: its[index] for other, its in enumerate(found.rivals) if index in its})
        for index, (own, fold) in enumerate(zip(found.own, folds, strict=True))
    ]


def folds_of(episodes: Sequence[Trajectory], others: str) -> list[int]:
    """Return the fold of each episode; `tasks` deals whole tasks into folds, `episodes` deals single episodes."""
    return folds_by([one.task.id if others == "tasks" else one.key for one in episodes])


def prospects(features: Sequence[Tensor], outcomes: Sequence[Tensor], folds: Sequence[int]) -> Prospects:
    """Return chances of a success, by ridge regression of outcomes on the episodes of other folds; see `cross_fit`.

    Args:
        features: Of each episode [turns, features].
        outcomes: Of each episode, 1 for a success and 0 for none, float64 [turns].
        folds: The fold of each episode, from 0 without a gap.
    """
    rivals = []
    for fold in range(max(folds, default=-1) + 1):
        rest = [index for index, its in enumerate(folds) if its != fold]
        labels = {its: label for label, its in enumerate(sorted({folds[index] for index in rest}))}
        found = cross_fit(
            [features[index] for index in rest],
            [outcomes[index] for index in rest],
            [labels[folds[index]] for index in rest],
        )
        rivals.append(dict(zip(rest, map(_chances, found), strict=True)))
    return Prospects([_chances(one) for one in cross_fit(features, outcomes, folds)], rivals)


class PredictedSuccess(Quantity):
    """Chance of a success before each turn, by a ridge regression on hidden states: `prospects`.

    Given as `success_chance`, a `Chances` a trajectory.
    """

    traits: ClassVar[QuantityTraits] = QuantityTraits(
        "a pass of the policy that acted over the episodes, and ridge fits",
        passes=1,
        policies=frozenset({ACTED}),
    )
    request: ClassVar[type[Need]] = SuccessChance

    def compute(self, request: SuccessChance, episodes: Sequence[Trajectory], source: Source) -> Computed:
        """Compute the chances, by heads on the policy that acted."""
        found = chances_of(episodes, request.others, source.policy(ACTED))
        seen = [[[each] for each in one.own] for one in found]
        true = [[[float(succeeded(one))] for _ in one.turns] for one in episodes]
        return Computed(found, counts={"explained_variance": explained_variance(seen, true)})

    def exact(self, request: SuccessChance, ground: Ground) -> list[Chances]:
        """Return the exact chance of a success in the state of each turn; every episode is a fold of its own."""
        return [
            Chances([ground.episodes.chance(step.state, t) for t, step in enumerate(steps)], fold)
            for fold, steps in enumerate(ground.episodes.steps)
        ]


def _chances(values: Tensor) -> list[float]:
    """Return predictions as chances."""
    return [float(value) for value in values.clamp(0, 1)]
