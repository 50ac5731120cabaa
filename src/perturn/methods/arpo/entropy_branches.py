"""Explorer `entropy-branches`: branches start at turns where the exploring policy was uncertain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, fsum, lgamma, log, log1p
from typing import Annotated

from perturn.extend import (
    COUNT,
    NOT_NEGATIVE,
    Bound,
    ExploredBrancher,
    ExploreInputs,
    ExplorerTraits,
    Forecast,
    Forks,
    Job,
    Need,
    Prover,
    Trajectory,
    fork_counts,
    seed_of,
)


@dataclass(frozen=True)
class EntropyBranches(ExploredBrancher):
    """Resume explored episodes at random turns, with a probability that grows with the policy's entropy (ARPO).

    Source: Dong et al. 2025, "Agentic Reinforced Policy Optimization", arXiv:2507.19849, by its abstract and notes
    on its code.
    Differs: the entropy is computed at the first token of a turn; the paper averages over the first tokens after a
    tool's reply. Only explored episodes are resumed, not branches.
    """

    forks: Annotated[int, COUNT] = 1
    """Maximum number of branching turns of an episode."""
    chance: Annotated[float, Bound(least=0, most=1)] = 0.5
    """Probability of a branch at a turn with the entropy of the first turn, in [0, 1]."""
    gain: Annotated[float, NOT_NEGATIVE] = 0.2
    """Increase of this probability for an increase of the entropy by log(vocabulary), its largest possible value."""
    policy: Prover | None = None
    """Policy that plays the branches. base: the base model of the run. sft: the policy after SFT. None: the policy that
    explored."""

    @property
    def traits(self) -> ExplorerTraits:
        """Traits of the explorer: branches at turns that are chosen with the exploring policy."""
        imposes = self.imposed(self.policy)
        return ExplorerTraits(frozenset({"branches"}), imposes, policy=self.policy, reads_policy=True)

    @property
    def needs(self) -> tuple[str | Need, ...]:
        """Entropy at the first token of each turn."""
        return ("entropy",)

    def check(self, turns: int, tasks: int) -> None:
        """Reject settings with which no episode is resumed, or the turn limit of branches has no effect."""
        self.check_turns(1, turns)

    def choose(self, inputs: ExploreInputs) -> list[Forks]:
        """Choose the branching turns of each episode; see `uncertain_turns`."""
        begun, found = {one.key for one in inputs.begun}, []
        for one, seen in zip(inputs.explored, inputs.read["entropy"], strict=True):
            own = uncertain_turns(one, seen, self, inputs.seed, inputs.iteration) if one.key in begun else ()
            found.append(Forks(*one.key, tuple(own), tuple(seen)))
        return found

    def counts(
        self, inputs: ExploreInputs, jobs: Sequence[Job], branches: Sequence[Trajectory]
    ) -> dict[str, float]:
        """Return figures on the branching turns, and on the policy's entropy at these turns and elsewhere.

        Returns:
            The counts of `perturn.data.forks.fork_counts`; `entropy`, the mean entropy at the chosen turns; and
            `entropy_elsewhere`, the mean entropy at the other turns that could have been chosen.
        """
        begun = {one.key for one in inputs.begun}
        at = [each.seen[turn] for each in inputs.chosen for turn in each.turns]
        rest = [
            seen
            for each in inputs.chosen
            if each.key in begun
            for turn, seen in enumerate(each.seen)
            if turn not in (0, *each.turns)
        ]
        means = {"entropy": at, "entropy_elsewhere": rest}
        own = {key: round(fsum(each) / len(each), 4) for key, each in means.items() if each}
        return fork_counts(inputs.chosen) | own

    def forecast(self, explored: int, turns: float, expert_turns: float) -> Forecast:
        """Return the expected work if all turns have the entropy of the first turn."""
        return self.expected(explored, expected_forks(self.forks, self.chance, turns), turns)


def expected_forks(forks: int, chance: float, turns: float) -> float:
    """Return the expected number of branching turns of an episode, E[min(forks, X)] with X binomial.

    Args:
        forks: Maximum number of branching turns.
        chance: Probability that a turn after the first is chosen, in [0, 1].
        turns: Number of turns of the episode. Between two whole numbers, the result is interpolated.
    """

    def whole(later: int) -> float:
        if chance in (0, 1):
            return min(forks, later * chance)
        fewer = range(min(forks, later + 1))
        return forks - fsum((forks - count) * _binomial(count, later, chance) for count in fewer)

    below, rest = divmod(max(0.0, turns - 1), 1)
    return (1 - rest) * whole(int(below)) + rest * whole(int(below) + 1)


def _binomial(count: int, of: int, chance: float) -> float:
    """Return the probability of `count` among `of` independent events, with a chance between 0 and 1."""
    ways = lgamma(of + 1) - lgamma(count + 1) - lgamma(of - count + 1)
    return exp(ways + count * log(chance) + (of - count) * log1p(-chance))


def uncertain_turns(
    one: Trajectory, entropies: Sequence[float], settings: EntropyBranches, seed: int, iteration: int = 1
) -> list[int]:
    """Choose branching turns of an episode at random, with a probability that grows with their entropy.

        turn t is chosen if  u_t < chance + gain (H_t - H_0),   u_t uniform in [0, 1)

    Source: Dong et al. 2025, "Agentic Reinforced Policy Optimization", arXiv:2507.19849, by its abstract and notes on
    its code: rand - 0.2 (H_t - H_0) <= 0.5.
    Differs: H is the entropy at the first token of the action, before any token is sampled. Of the chosen turns, the
    first `forks` turns are used.

    Args:
        one: Explored episode.
        entropies: Entropy of each turn, without unit [turns].
        settings: Explorer with `chance`, `gain` and `forks`.
        seed: Seed of the run.
        iteration: Number of the iteration, from 1.
    """
    found: list[int] = []
    for turn in range(1, len(entropies)):
        chance = settings.chance + settings.gain * (entropies[turn] - entropies[0])
        if len(found) < settings.forks and seed_of(seed, *one.key, iteration, "fork", turn) < chance * 2**32:
            found.append(turn)
    return found
