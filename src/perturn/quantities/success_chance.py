"""The turns that are played on from where the episode may as well succeed as fail, as a predictor has it.

The predictor is a linear head on the last hidden states of the policy that explored, fitted on other episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perturn.data.forks import Forks
from perturn.policy.logprobs import prepare
from perturn.policy.reference import frozen
from perturn.policy.values import cross_fit, folds_by, turn_features
from perturn.quantities.readers import Reader, encoded
from perturn.run.panels import seed_of
from perturn.settings.branch import Branch
from perturn.types import Trajectory, succeeded


@dataclass(frozen=True)
class Prospects:
    """Chances of a success before each turn of some episodes, as others tell of them."""

    own: list[list[float]]
    """By the head of the episode's fold, which learned from all other folds, between 0 and 1 `[episodes][turns]`."""
    rivals: list[dict[int, list[float]]]
    """Of each fold, the episodes of the other folds by their index: each by a head that learned from the rest of these,
    so that nothing here depends on the fold `[folds][episodes][turns]`."""


def by_prospects(
    played: Sequence[Trajectory], reader: Reader, settings: Branch, seed: int, iteration: int
) -> list[Forks]:
    """Turns by how mixed the outcomes are that a predictor expects from there; see `mixed_turns`.

    Args:
        played: Episodes that did not fail, by task and sample.
        reader: The policy that explored.
        settings: `forks`, `others` and `of`.
        seed: Of the run.
        iteration: From 1.
    """
    rows = encoded(played, reader.renderer)
    prepare(reader.model)
    sequences = [row.chosen for row in rows.values()]
    with frozen(reader.model):
        features = turn_features(
            reader.model, sequences, [[1] * one.turns for one in sequences], reader.token_budget
        )
    told = [played[index] for index in rows]
    outcomes = [
        torch.full((len(own),), float(succeeded(one)), dtype=torch.float64)
        for one, own in zip(told, features, strict=True)
    ]
    folds = folds_of(told, settings.others)
    found = prospects(features, outcomes, folds)
    turns = mixed_turns(told, found, folds, settings, seed, iteration)
    chosen = dict(zip(rows, zip(turns, found.own, strict=True), strict=True))
    nothing: tuple[list[int], list[float]] = ([], [])
    listed = ((one, *chosen.get(index, nothing)) for index, one in enumerate(played))
    return [Forks(one.task.id, one.sample, tuple(own), tuple(seen)) for one, own, seen in listed]


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


def mixed_turns(
    episodes: Sequence[Trajectory],
    found: Prospects,
    folds: Sequence[int],
    settings: Branch,
    seed: int,
    iteration: int = 1,
) -> list[list[int]]:
    """Turns where the predicted variance p (1 - p) of the outcome is at least that which others set.

    The bar of a fold is the variance of the last of the first `forks` turns an episode, in the order of their
    variances, of the other folds. So a turn is chosen whatever comes after it in its episode, and `forks` is met in the
    mean. Turns of equal variance are in an order by lot.

    Source: TRACE, by its abstract: rollouts go to prefixes that are most likely to have mixed outcomes, as a predictor
    of successes that all share has it.
    Differs: first turns get no samples beyond those that explore; the predictor and its bar are of other folds.

    Args:
        episodes: That the predictions are of.
        found: From `prospects`.
        folds: As given there.
        settings: `forks` and `of`.
        seed: Of the run.
        iteration: From 1.

    Returns:
        Turns in order, each after the first one of its episode [episodes].
    """

    def ranked(index: int, chances: Sequence[float]) -> list[tuple[float, int]]:
        """Variance of each turn after the first, and its lot."""
        key = episodes[index].key
        return [
            (chance * (1 - chance), seed_of(seed, *key, iteration, "fork", turn))
            for turn, chance in enumerate(chances)
            if turn
        ]

    played = [settings.of != "failures" or not succeeded(one) for one in episodes]
    bars: list[tuple[float, int] | None] = []
    for rivals in found.rivals:
        own = {index: chances for index, chances in rivals.items() if played[index]}
        ranks = sorted((rank for each in own.items() for rank in ranked(*each)), reverse=True)
        bars.append(ranks[: settings.forks * len(own)][-1] if ranks else None)
    turns: list[list[int]] = []
    for index, chances in enumerate(found.own):
        bar = bars[folds[index]]
        turns.append([])
        if bar is not None and played[index]:
            turns[-1] = [turn for turn, rank in enumerate(ranked(index, chances), 1) if rank >= bar]
    return turns


def _chances(values: Tensor) -> list[float]:
    """Predictions as chances."""
    return [float(value) for value in values.clamp(0, 1)]
