"""Explorer `branches`: explored episodes are resumed at regular intervals of turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from perturn.config.explorer_settings import ExplorerTraits
from perturn.config.sections import COUNT
from perturn.explore.branching import ExploredBrancher, Prover
from perturn.explore.protocol import Forecast
from perturn.types import Trajectory


@dataclass(frozen=True)
class Branches(ExploredBrancher):
    """Resume explored episodes at regular intervals of turns, to estimate the value of their turns.

    Branching turns are known in advance, so their choice does not depend on later turns.

    Source: Kazemnejad et al. 2024, "VinePPO", arXiv:2410.01679; Guo et al. 2025, "Segment Policy Optimization",
    arXiv:2505.23564; both by their abstracts.
    Differs: branches begin at regular intervals of turns; the papers resume an answer at steps of its text.
    """

    every: Annotated[int, COUNT] = 5
    """Turns from one branching turn to the next; an episode's first branching turn is its first turn plus this many."""
    policy: Prover | None = None
    """Who plays the branches: base, the model that the run begins with, or sft, the policy after SFT. None: the policy
    that explored."""

    @property
    def traits(self) -> ExplorerTraits:
        """Branches at regular turns, or at each."""
        each = {"turn-branches"} if self.every == 1 else set()
        provides = frozenset({"branches", "regular-branches"} | each)
        return ExplorerTraits(provides, self.imposed(self.policy), policy=self.policy)

    def check(self, turns: int, tasks: int) -> None:
        """Reject settings with which no episode is resumed, or no branch is cut."""
        self.check_turns(self.every, turns, "every")

    def turns_of(self, one: Trajectory) -> Sequence[int]:
        """Return turns at equal distances."""
        return range(self.every, len(one.turns), self.every)

    def forecast(self, explored: int, turns: float, expert_turns: float) -> Forecast:
        """Return the expected work of episodes that are resumed at regular intervals of turns."""
        return self.expected(explored, int((turns - 1) // self.every), turns)
