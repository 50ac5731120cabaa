"""Explorer `wrong-branches`: explored episodes are resumed at their first wrong turn."""

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
    """Resume explored episodes at the first turn that brings the success no nearer.

    Some environments can measure the distance to a success (`perturn.envs.abilities.Pathfinder`).

    Source: Lai et al. 2024, "Step-DPO: Step-wise Preference Optimization for Long-chain Reasoning of LLMs",
    arXiv:2406.18629, by its abstract.
    Differs: the environment says which turn is wrong, where the paper asks a model.
    """

    distance: Sense = "searching"
    """In which sense the distance is measured: `shortest`, with full knowledge of the world, or `searching`,
    by the expert, who knows only what the episode has shown."""
    policy: Prover | None = None
    """Who plays the branches: base, the model that the run begins with, or sft, the policy after SFT. None: the policy
    that explored."""

    @property
    def traits(self) -> ExplorerTraits:
        """Branches at wrong turns."""
        return ExplorerTraits(frozenset({"wrong-branches"}), self.imposed(self.policy), policy=self.policy)

    @property
    def needs(self) -> tuple[str | Need, ...]:
        """The distance to a success around each turn."""
        return (Distance(self.distance),)

    def check(self, turns: int, tasks: int) -> None:
        """Reject branches of which none is cut."""
        self.check_turns(0, turns)

    def turns_of(self, one: Trajectory) -> Sequence[int]:
        """Return the first wrong turn, if there is one."""
        wrong = wrong_turns(one)
        return [wrong.index(True)] if True in wrong else []

    def forecast(self, explored: int, turns: float, expert_turns: float) -> Forecast:
        """Return what to expect if each episode has a wrong turn."""
        return self.expected(explored, 1, turns)
