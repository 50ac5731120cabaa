"""Explorer `branches`: resume explored episodes at regular intervals of turns."""

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

    Branching turns are fixed in advance, so their choice does not depend on later turns of the episode.

    Source: Kazemnejad et al. 2024, "VinePPO", arXiv:2410.01679; Guo et al. 2025, "Segment Policy Optimization",
    arXiv:2505.23564; according to the abstracts of both papers.
    Differs: Branches begin at regular intervals of turns. The papers resume an answer at steps of its text.
    """

    every: Annotated[int, COUNT] = 5
    """Number of turns between branching turns. The first branching turn comes after this many turns."""
    policy: Prover | None = None
    """Policy that plays the branches: `base` is the model before training, and `sft` is the policy after SFT. None: the
    policy that explored."""

    @property
    def traits(self) -> ExplorerTraits:
        """Traits of the explorer: it provides branches at regular turns, or at each turn if `every` is 1."""
        each = {"turn-branches"} if self.every == 1 else set()
        provides = frozenset({"branches", "regular-branches"} | each)
        return ExplorerTraits(provides, self.imposed(self.policy), policy=self.policy)

    def check(self, turns: int, tasks: int) -> None:
        """Reject settings with which no episode can branch, `turns` shortens no branch, or all branches are equal."""
        self.check_turns(self.every, turns, "every")

    def turns_of(self, one: Trajectory) -> Sequence[int]:
        """Return the branching turns of an episode: every `every`-th turn."""
        return range(self.every, len(one.turns), self.every)

    def forecast(self, explored: int, turns: float, expert_turns: float) -> Forecast:
        """Return the expected number of branches, and the expected number of their turns."""
        return self.expected(explored, int((turns - 1) // self.every), turns)
