"""Quantity `success-chance`: predicted probability that an episode succeeds, before each of its turns.

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
    """Predicted probability of a success before each turn of an episode."""

    own: Sequence[float] = ()
    """Prediction of the head that was fitted on all folds except the episode's fold, in [0, 1] [turns]."""
    fold: int | None = None
    """Fold of the episode; None: it has no turns."""
    without: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Another fold -> prediction of the head fitted without this fold and the episode's fold, in [0, 1] [turns]."""


@dataclass(frozen=True)
class Prospects:
    """Cross-fitted predictions of a success before each turn of several episodes."""

    own: list[list[float]]
    """Prediction of the head that was fitted on all folds except the episode's fold, in [0, 1] `[episodes][turns]`."""
    rivals: list[dict[int, list[float]]]
    """For each fold, predictions for the episodes of all other folds, by index `[folds][episodes][turns]`. Their heads
    were fitted without this fold and without the episode's fold, so they do not depend on this fold."""


def chances_of(trajectories: Sequence[Trajectory], others: str, reader: Reader) -> list[Chances]:
    """Return the predicted probabilities of a success for each episode.

    Args:
        trajectories: Episodes, in any order.
        others: See `SuccessChance.others`.
        reader: Loaded policy, whose hidden states the heads read.
    """
    rows = encoded(trajectories, reader.renderer)
    sequences = [row.chosen for row in rows.values()]
    with frozen(reader.model, reader.precision):
        features = turn_features(
            reader.model, sequences, [[1] * one.turns for one in sequences], reader.token_budget
        )
    played = [trajectories[index] for index in rows]
    outcomes = [
        torch.full((len(own),), float(succeeded(one)), dtype=torch.float64)
        for one, own in zip(played, features, strict=True)
    ]
    folds = folds_of(played, others)
    found = dict(zip(rows, chances_of_folds(prospects(features, outcomes, folds), folds), strict=True))
    return [found.get(index, Chances()) for index in range(len(trajectories))]


def chances_of_folds(found: Prospects, folds: Sequence[int]) -> list[Chances]:
    """Return the predictions for each episode as `Chances`, given the fold of each episode."""
    return [
        Chances(own, fold, {other: its[index] for other, its in enumerate(found.rivals) if index in its})
        for index, (own, fold) in enumerate(zip(found.own, folds, strict=True))
    ]


def folds_of(episodes: Sequence[Trajectory], others: str) -> list[int]:
    """Return the fold of each episode. With `others` tasks, all episodes of a task are in one fold."""
    return folds_by([one.task.id if others == "tasks" else one.key for one in episodes])


def prospects(features: Sequence[Tensor], outcomes: Sequence[Tensor], folds: Sequence[int]) -> Prospects:
    """Predict the probability of a success before each turn, with ridge regressions on other folds; see `cross_fit`.

    Args:
        features: Hidden states of each episode, each [turns, features].
        outcomes: Outcome of each episode, 1 for a success, else 0, repeated for each turn; float64, each [turns].
        folds: Fold of each episode; the folds are numbered from 0 without gaps.
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
    """Probability of a success before each turn, from ridge regressions on hidden states; see `prospects`.

    An explorer or a credit gets it as `success_chance`: one `Chances` per trajectory.
    """

    traits: ClassVar[QuantityTraits] = QuantityTraits(
        "a pass of the policy that acted over the episodes, and ridge fits",
        passes=1,
        policies=frozenset({ACTED}),
    )
    request: ClassVar[type[Need]] = SuccessChance

    def compute(self, request: SuccessChance, episodes: Sequence[Trajectory], source: Source) -> Computed:
        """Compute the probabilities with heads on the hidden states of the policy that acted."""
        found = chances_of(episodes, request.others, source.policy(ACTED))
        seen = [[[each] for each in one.own] for one in found]
        true = [[[float(succeeded(one))] for _ in one.turns] for one in episodes]
        return Computed(found, counts={"explained_variance": explained_variance(seen, true)})

    def exact(self, request: SuccessChance, ground: Ground) -> list[Chances]:
        """Return the exact probability of a success in the state of each turn; every episode has its own fold."""
        return [
            Chances([ground.episodes.chance(step.state, t) for t, step in enumerate(steps)], fold)
            for fold, steps in enumerate(ground.episodes.steps)
        ]


def _chances(values: Tensor) -> list[float]:
    """Clamp predictions to probabilities in [0, 1] [turns]."""
    return [float(value) for value in values.clamp(0, 1)]
