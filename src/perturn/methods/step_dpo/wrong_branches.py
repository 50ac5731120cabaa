"""Explorer `wrong-branches`: branches start at the first wrong turn of each explored episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perturn.extend import (
    Distance,
    ExploredBrancher,
    ExplorerTraits,
    Forecast,
    Need,
    Prover,
    Sense,
    Trajectory,
    wrong_turns,
)


@dataclass(frozen=True)
class WrongBranches(ExploredBrancher):
    """Resume explored episodes at their first turn that comes no closer to success.

    The environment must measure the distance to a success (`perturn.envs.abilities.Pathfinder`).

    Source: Lai et al. 2024, "Step-DPO: Step-wise Preference Optimization for Long-chain Reasoning of LLMs",
    arXiv:2406.18629, by its abstract.
    Differs: the environment decides which turn is wrong; the paper asks a model.
    """

    distance: Sense = "searching"
    """Measure of the distance to a success. shortest: the shortest path, with full knowledge of the environment.
    searching: the path of the environment's expert, who knows only what the episode has shown."""
    policy: Prover | None = None
    """Policy that plays the branches. base: the base model of the run. sft: the policy after SFT. None: the policy that
    explored."""

    @property
    def traits(self) -> ExplorerTraits:
        """Traits of the explorer: branches at wrong turns."""
        return ExplorerTraits(frozenset({"wrong-branches"}), self.imposed(self.policy), policy=self.policy)

    @property
    def needs(self) -> tuple[str | Need, ...]:
        """Distance to a success around each turn."""
        return (Distance(self.distance),)

    def check(self, turns: int, tasks: int) -> None:
        """Reject a limit on the turns of branches that would have no effect."""
        self.check_turns(0, turns)

    def turns_of(self, one: Trajectory) -> Sequence[int]:
        """Return the first wrong turn of an episode; an empty list if no turn is wrong."""
        wrong = wrong_turns(one)
        return [wrong.index(True)] if True in wrong else []

    def forecast(self, explored: int, turns: float, expert_turns: float) -> Forecast:
        """Return the expected work if each episode has a wrong turn."""
        return self.expected(explored, 1, turns)
