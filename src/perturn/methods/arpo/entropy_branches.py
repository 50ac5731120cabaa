"""Explorer `entropy-branches`: explored episodes are resumed where the policy that explored was uncertain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Annotated

from perturn.extend import (
    COUNT,
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
    """Resume explored episodes at turns that are drawn with a chance that grows with the policy's entropy (ARPO).

    Source: Dong et al. 2025, "Agentic Reinforced Policy Optimization", arXiv:2507.19849, by its abstract and notes
    on its code.
    Differs: the entropy is of the first token of a turn; the paper takes a mean over the first tokens after a tool's
    reply. Only explored episodes are resumed, not branches.
    """

    forks: Annotated[int, COUNT] = 1
    """Most turns of an episode at which branches begin."""
    chance: Annotated[float, Bound(least=0, most=1)] = 0.5
    """Chance of a turn whose entropy equals the first turn's entropy."""
    gain: Annotated[float, Bound(least=0)] = 0.2
    """Increase of the chance for the largest possible increase of the entropy, log(vocabulary)."""
    policy: Prover | None = None
    """Who plays the branches: base, the model that the run begins with, or sft, the policy after SFT. None: the policy
    that explored."""

    @property
    def traits(self) -> ExplorerTraits:
        """Branches at turns that the policy that explored chooses."""
        imposes = self.imposed(self.policy)
        return ExplorerTraits(frozenset({"branches"}), imposes, policy=self.policy, reads_policy=True)

    @property
    def needs(self) -> tuple[str | Need, ...]:
        """The entropy of the first token of each turn."""
        return ("entropy",)

    def check(self, turns: int, tasks: int) -> None:
        """Reject settings with which no episode is resumed, or no branch is cut."""
        self.check_turns(1, turns)

    def choose(self, inputs: ExploreInputs) -> list[Forks]:
        """Return turns by chances that grow with the entropy; see `uncertain_turns`."""
        begun, found = {one.key for one in inputs.begun}, []
        for one, seen in zip(inputs.explored, inputs.read["entropy"], strict=True):
            own = uncertain_turns(one, seen, self, inputs.seed, inputs.iteration) if one.key in begun else ()
            found.append(Forks(*one.key, tuple(own), tuple(seen)))
        return found

    def counts(
        self, inputs: ExploreInputs, jobs: Sequence[Job], branches: Sequence[Trajectory]
    ) -> dict[str, float]:
        """Return where episodes were resumed, and how uncertain the policy was there and elsewhere.

        Returns:
            The counts of `perturn.data.forks.fork_counts`; `entropy` and `entropy_elsewhere`, means over the chosen
            turns and over the others that could have been chosen.
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
        """Return what to expect if the entropy stays as in the first turn."""
        return self.expected(explored, min(self.forks, self.chance * (turns - 1)), turns)


def uncertain_turns(
    one: Trajectory, entropies: Sequence[float], settings: EntropyBranches, seed: int, iteration: int = 1
) -> list[int]:
    """Choose turns of an episode with a probability that grows with their entropy, up to a number of turns.

        u_t < chance + gain (H_t - H_0),   u_t even between 0 and 1

    Source: Dong et al. 2025, "Agentic Reinforced Policy Optimization", arXiv:2507.19849, by its abstract and notes on
    its code: rand - 0.2 (H_t - H_0) <= 0.5.
    Differs: H is of the first token of the action, and averaged over what could be said; the episode's budget goes
    to its first such turns.

    Args:
        one: The explored episode.
        entropies: Of each of its turns, without unit [turns].
        settings: `chance`, `gain` and `forks`.
        seed: Of the run.
        iteration: From 1.
    """
    found: list[int] = []
    for turn in range(1, len(entropies)):
        chance = settings.chance + settings.gain * (entropies[turn] - entropies[0])
        if len(found) < settings.forks and seed_of(seed, *one.key, iteration, "fork", turn) < chance * 2**32:
            found.append(turn)
    return found
