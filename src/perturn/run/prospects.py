"""The turns that are played on from where the episode may as well succeed as fail, as a predictor has it."""

from __future__ import annotations

from collections.abc import Sequence

from perturn.data.forks import Forks
from perturn.quantities.readers import Reader
from perturn.quantities.success_chance import Chances, chances_of
from perturn.run.panels import seed_of
from perturn.settings.branch import Branch
from perturn.types import Trajectory, succeeded


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
    found = chances_of(played, settings.others, reader)
    turns = mixed_turns(played, found, settings, seed, iteration)
    return [
        Forks(*one.key, tuple(own), tuple(its.own))
        for one, own, its in zip(played, turns, found, strict=True)
    ]


def mixed_turns(
    episodes: Sequence[Trajectory],
    found: Sequence[Chances],
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
        found: Of each episode.
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
    bars: dict[int, tuple[float, int] | None] = {}
    for fold in {its.fold for its in found if its.fold is not None}:
        own = {
            index: its.without[fold]
            for index, its in enumerate(found)
            if played[index] and fold in its.without
        }
        ranks = sorted((rank for each in own.items() for rank in ranked(*each)), reverse=True)
        bars[fold] = ranks[: settings.forks * len(own)][-1] if ranks else None
    turns: list[list[int]] = []
    for index, its in enumerate(found):
        bar = None if its.fold is None else bars[its.fold]
        turns.append([])
        if bar is not None and played[index]:
            turns[-1] = [turn for turn, rank in enumerate(ranked(index, its.own), 1) if rank >= bar]
    return turns
