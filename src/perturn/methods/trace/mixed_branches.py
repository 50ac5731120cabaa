"""Explorer `mixed-branches`: explored episodes are resumed where a predictor expects mixed outcomes."""

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
"""Tasks, or episodes, that the predictor needs: the predicted one, and two that its choices are compared with."""


@dataclass(frozen=True)
class SuccessChance(Need):
    """Chance of a success before each turn, by heads on hidden states that are fitted on other episodes.

    Given as `success_chance`, a `perturn.methods.trace.success_chance.Chances` a trajectory.
    """

    name: ClassVar[str] = "success-chance"
    others: str = "tasks"
    """Episodes that a head learns from: episodes of other tasks (tasks), or any other episodes (episodes)."""


class Chances(Protocol):
    """Predicted chances of a success before each turn of an episode: an entry of the quantity `success-chance`."""

    @property
    def own(self) -> Sequence[float]:
        """By the head of the episode's fold, which learned from all other folds, between 0 and 1 [turns]."""

    @property
    def fold(self) -> int | None:
        """Fold of the episode; None: it has no turns."""

    @property
    def without(self) -> Mapping[int, Sequence[float]] | None:
        """By the head that learned neither from the episode's fold nor from another one, by that other fold."""


@dataclass(frozen=True)
class MixedBranches(ExploredBrancher):
    """Resume explored episodes at turns whose predicted chance of a success is near one half (TRACE).

    The predictor is a linear head on the hidden states of the policy that explored, fitted on other episodes.

    Source: TRACE, by its abstract.
    Differs: prompts get no further samples, since every task has `samples`. The predictor is a linear head.
    """

    forks: Annotated[int, COUNT] = 1
    """Branching turns per episode, on average over the episodes of an iteration."""
    others: Literal["tasks", "episodes"] = "tasks"
    """Episodes that the predictor learns from: episodes of other tasks, or also other samples of the task. Other
    samples predict better, but bias a credit that trains on branches."""

    @property
    def traits(self) -> ExplorerTraits:
        """Branches of the policy that explored, at turns that it chooses."""
        bent = {"dependent-branches"} if self.others == "episodes" else set()
        return ExplorerTraits(frozenset({"branches"}), self.imposed(None) | bent, reads_policy=True)

    @property
    def needs(self) -> tuple[str | Need, ...]:
        """The predicted chance of a success before each turn."""
        return (SuccessChance(self.others),)

    def check(self, turns: int, tasks: int) -> None:
        """Reject a predictor that too few others teach, and settings with which nothing is resumed or cut."""
        others = tasks if self.others == "tasks" else tasks * self.samples
        name, must = f"other {self.others} of an iteration", f"be {LEAST} or more, to teach the predictor"
        check_fit(others == 0 or others >= LEAST, name, must, others, "Explore more tasks.")
        self.check_turns(1, turns)

    def choose(self, inputs: ExploreInputs) -> list[Forks]:
        """Return turns by how mixed their predicted outcomes are; see `mixed_turns`."""
        found: Sequence[Chances] = inputs.read["success-chance"]
        turns = mixed_turns(inputs.explored, found, self, inputs.seed, inputs.iteration)
        each = zip(inputs.explored, turns, found, strict=True)
        return [Forks(*one.key, tuple(own), tuple(chances.own)) for one, own, chances in each]

    def counts(
        self, inputs: ExploreInputs, jobs: Sequence[Job], branches: Sequence[Trajectory]
    ) -> dict[str, float]:
        """Return where episodes were resumed, and how the predictor did.

        Returns:
            The counts of `perturn.data.forks.fork_counts`; `explained_variance` of successes by the predictor;
            `predicted`, its mean chance at the chosen turns; and `came_true`, the share of branches that succeeded.
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
        """Return the expected work if this number of turns of an episode is resumed, but never the first turn."""
        return self.expected(explored, min(self.forks, turns - 1), turns)


def mixed_turns(
    episodes: Sequence[Trajectory],
    found: Sequence[Chances],
    settings: MixedBranches,
    seed: int,
    iteration: int = 1,
) -> list[list[int]]:
    """Return turns where the predicted variance p (1 - p) of the outcome is at least that which others set.

    The bar of a fold is the variance of the last of the first `forks` turns per episode, in the order of
    their variances, of the other folds. So a turn is chosen whatever comes after it in its episode, and the
    number of chosen turns per episode is `forks` on average. Turns of equal variance are in an order by lot.

    Source: TRACE, by its abstract: rollouts go to prefixes that are most likely to have mixed outcomes, as a predictor
    of successes that all share has it.
    Differs: first turns get no samples beyond those that explore; the predictor and its bar are of other folds.

    Args:
        episodes: That the predictions are of.
        found: Predictions of each.
        settings: `forks` and `of`.
        seed: Of the run.
        iteration: From 1.

    Returns:
        Turns in order, each after the first one of its episode [episodes].
    """

    def ranked(index: int, chances: Sequence[float]) -> list[tuple[float, int]]:
        """Return the variance of each turn after the first, and its lot."""
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
    """Share of the variance of outcomes that chances explain, (chance, outcome) a turn; None where all are alike."""
    ends = [end for _, end in told]
    if len(set(ends)) < 2:
        return None
    return 1 - pvariance([end - seen for seen, end in told]) / pvariance(ends)
