"""How likely an episode is to succeed from each of its turns, as a predictor has it.

The predictor is a linear head on the last hidden states of the policy that explored, fitted on other episodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perturn.policy.logprobs import prepare
from perturn.policy.reference import frozen
from perturn.policy.values import cross_fit, folds_by, turn_features
from perturn.run.readings import Reader, encoded
from perturn.types import Trajectory, succeeded


@dataclass(frozen=True)
class Prospects:
    """Chances of a success before each turn of some episodes, as others tell of them."""

    own: list[list[float]]
    """By the head of the episode's fold, which learned from all other folds, between 0 and 1 `[episodes][turns]`."""
    rivals: list[dict[int, list[float]]]
    """Of each fold, the episodes of the other folds by their index: each by a head that learned from the rest of these,
    so that nothing here depends on the fold `[folds][episodes][turns]`."""


@dataclass(frozen=True)
class Chances:
    """Predicted chances of a success before each turn of an episode."""

    own: Sequence[float] = ()
    """By the head of the episode's fold, which learned from all other folds, between 0 and 1 [turns]."""
    fold: int | None = None
    """Fold of the episode; None: it has no turns."""
    without: Mapping[int, Sequence[float]] | None = None
    """By the head that learned neither from the episode's fold nor from another fold, by the number of that fold."""


def chances_of(trajectories: Sequence[Trajectory], others: str, reader: Reader) -> list[Chances]:
    """Return the predicted chances of each episode.

    Args:
        trajectories: Episodes, in any order.
        others: Whose outcomes tell of an episode: those of other tasks, or of other episodes.
        reader: The policy that explored.
    """
    rows = encoded(trajectories, reader.renderer)
    prepare(reader.model)
    sequences = [row.chosen for row in rows.values()]
    with frozen(reader.model):
        features = turn_features(
            reader.model, sequences, [[1] * one.turns for one in sequences], reader.token_budget
        )
    told = [trajectories[index] for index in rows]
    outcomes = [
        torch.full((len(own),), float(succeeded(one)), dtype=torch.float64)
        for one, own in zip(told, features, strict=True)
    ]
    folds = folds_of(told, others)
    found = prospects(features, outcomes, folds)
    by_index = {
        index: Chances(
            found.own[at], folds[at], {fold: own[at] for fold, own in enumerate(found.rivals) if at in own}
        )
        for at, index in enumerate(rows)
    }
    return [by_index.get(index, Chances()) for index in range(len(trajectories))]


def folds_of(episodes: Sequence[Trajectory], others: str) -> list[int]:
    """The fold of each episode: with `tasks` whole tasks are dealt into folds, with `episodes` each by itself."""
    return folds_by([one.task.id if others == "tasks" else one.key for one in episodes])


def prospects(features: Sequence[Tensor], outcomes: Sequence[Tensor], folds: Sequence[int]) -> Prospects:
    """Chances of a success, by ridge regression of outcomes on the episodes of other folds; see `cross_fit`.

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


def _chances(values: Tensor) -> list[float]:
    """Predictions as chances."""
    return [float(value) for value in values.clamp(0, 1)]
