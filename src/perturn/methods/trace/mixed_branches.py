"""Explorer `mixed-branches`: branches start at turns where a predictor expects mixed outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from statistics import pvariance
from typing import Annotated, ClassVar, Literal, Protocol

from perturn.extend import (
    COUNT,
    ExploredBrancher,
    ExploreInputs,
    ExplorerTraits,
    Forecast,
    Forks,
    Job,
    Need,
    Trajectory,
    check_fit,
    failed,
    fork_counts,
    seed_of,
    succeeded,
    unfinished,
)

LEAST = 3
"""Minimum number of tasks, or episodes, for the predictor: one to predict, and two others to fit and compare."""


@dataclass(frozen=True)
class SuccessChance(Need):
    """Probability of a success before each turn, from heads on hidden states that are fitted on other episodes.

    The explorer gets it as one `perturn.methods.trace.success_chance.Chances` per trajectory.
    """

    name: ClassVar[str] = "success-chance"
    others: str = "tasks"
    """Episodes on which a head is fitted. tasks: episodes of other tasks. episodes: all other episodes."""


class Chances(Protocol):
    """Predicted probability of a success before each turn of an episode: an entry of the quantity `success-chance`."""

    @property
    def own(self) -> Sequence[float]:
        """Prediction of the head that was fitted on all folds except the episode's fold, in [0, 1] [turns]."""

    @property
    def fold(self) -> int | None:
        """Fold of the episode; None: it has no turns."""

    @property
    def without(self) -> Mapping[int, Sequence[float]] | None:
        """Another fold -> prediction of the head fitted without this fold and the episode's fold, in [0, 1] [turns]."""


@dataclass(frozen=True)
class MixedBranches(ExploredBrancher):
    """Resume explored episodes at turns whose predicted probability of a success is near one half (TRACE).

    The predictor is a linear head on the hidden states of the policy that explored, fitted on other episodes.

    Source: TRACE, by its abstract.
    Differs: the first turn of a task gets no additional samples; every task has `samples` episodes. The predictor is a
    linear head.
    """

    forks: Annotated[int, COUNT] = 1
    """Number of branching turns per episode, on average over the episodes of an iteration."""
    others: Literal["tasks", "episodes"] = "tasks"
    """Episodes on which the predictor is fitted. tasks: episodes of other tasks. episodes: also other episodes of the
    task, which predict better but bias a credit that trains on branches."""

    @property
    def traits(self) -> ExplorerTraits:
        """Traits of the explorer: branches at turns that are chosen with the exploring policy."""
        bent = {"dependent-branches"} if self.others == "episodes" else set()
        return ExplorerTraits(frozenset({"branches"}), self.imposed(None) | bent, reads_policy=True)

    @property
    def needs(self) -> tuple[str | Need, ...]:
        """Predicted probability of a success before each turn."""
        return (SuccessChance(self.others),)

    def check(self, turns: int, tasks: int) -> None:
        """Reject too few tasks or episodes, and settings that `check_turns` rejects."""
        others = tasks if self.others == "tasks" else tasks * self.samples
        name, must = f"other {self.others} of an iteration", f"be {LEAST} or more, to teach the predictor"
        check_fit(others == 0 or others >= LEAST, name, must, others, "Explore more tasks.")
        self.check_turns(1, turns)

    def choose(self, inputs: ExploreInputs) -> list[Forks]:
        """Choose the branching turns of each episode by their predicted outcomes; see `mixed_turns`."""
        found: Sequence[Chances] = inputs.read["success-chance"]
        turns = mixed_turns(inputs.explored, found, self, inputs.seed, inputs.iteration)
        each = zip(inputs.explored, turns, found, strict=True)
        return [Forks(*one.key, tuple(own), tuple(chances.own)) for one, own, chances in each]

    def counts(
        self, inputs: ExploreInputs, jobs: Sequence[Job], branches: Sequence[Trajectory]
    ) -> dict[str, float]:
        """Return figures on the branching turns, and on the accuracy of the predictor.

        Returns:
            The counts of `perturn.data.forks.fork_counts`; `explained_variance`, the share of the variance of successes
            that the predictor explains; `predicted`, the mean predicted probability at the chosen turns; and
            `came_true`, the share of branches that succeeded.
        """
        ends = {one.key: float(succeeded(one)) for one in inputs.explored}
        told = [(seen, ends[each.key]) for each in inputs.chosen for seen in each.seen]
        at = [each.seen[turn] for each in inputs.chosen for turn in each.turns]
        came = [succeeded(one) for one in branches if not failed(one) and not unfinished(one)]
        own = {
            "explained_variance": _explained(told),
            "predicted": fsum(at) / len(at) if at else None,
            "came_true": sum(came) / len(came) if came else None,
        }
        return fork_counts(inputs.chosen) | {
            key: round(each, 4) for key, each in own.items() if each is not None
        }

    def forecast(self, explored: int, turns: float, expert_turns: float) -> Forecast:
        """Return the expected work if each episode is resumed at `forks` turns after its first turn."""
        return self.expected(explored, min(self.forks, turns - 1), turns)


def mixed_turns(
    episodes: Sequence[Trajectory],
    found: Sequence[Chances],
    settings: MixedBranches,
    seed: int,
    iteration: int = 1,
) -> list[list[int]]:
    """Choose the turns whose predicted variance p (1 - p) of the outcome reaches the threshold of their fold.

    The threshold of a fold is set on the other folds, such that `forks` turns per episode reach it there.
    So the choice of a turn does not depend on later turns of its episode, and `forks` turns per episode are chosen on
    average. Turns of equal variance are ordered at random.

    Source: TRACE, by its abstract: rollouts go to prefixes that are most likely to have mixed outcomes, according to a
    shared predictor of success.
    Differs: first turns get no additional samples. The predictor and the threshold come from other folds.

    Args:
        episodes: Explored episodes.
        found: Predictions for each episode.
        settings: Explorer with `forks` and `of`.
        seed: Seed of the run.
        iteration: Number of the iteration, from 1.

    Returns:
        Chosen turns of each episode in ascending order, never the first turn `[episodes][chosen turns]`.
    """

    def ranked(index: int, chances: Sequence[float]) -> list[tuple[float, int]]:
        """Return the predicted variance of each turn after the first, with a random number that breaks ties."""
        key = episodes[index].key
        return [
            (chance * (1 - chance), seed_of(seed, *key, iteration, "fork", turn))
            for turn, chance in enumerate(chances)
            if turn
        ]

    begun = [settings.of != "failures" or not succeeded(one) for one in episodes]
    bars: dict[int, tuple[float, int] | None] = {}
    for fold in {one.fold for one in found if one.fold is not None}:
        others = ((i, one.without or {}) for i, one in enumerate(found) if begun[i])
        rivals = {i: each[fold] for i, each in others if fold in each}
        ranks = sorted((rank for each in rivals.items() for rank in ranked(*each)), reverse=True)
        bars[fold] = ranks[: settings.forks * len(rivals)][-1] if ranks else None
    turns: list[list[int]] = []
    for index, one in enumerate(found):
        bar = None if one.fold is None else bars[one.fold]
        turns.append([])
        if bar is not None and begun[index]:
            turns[-1] = [turn for turn, rank in enumerate(ranked(index, one.own), 1) if rank >= bar]
    return turns


def _explained(told: Sequence[tuple[float, float]]) -> float | None:
    """Return the share of the variance of outcomes that predictions explain; None if all outcomes are equal.

    Args:
        told: (predicted probability, outcome) of each turn.
    """
    ends = [end for _, end in told]
    if len(set(ends)) < 2:
        return None
    return 1 - pvariance([end - seen for seen, end in told]) / pvariance(ends)
