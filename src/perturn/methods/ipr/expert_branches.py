"""Explorer `expert-branches`: the policy resumes the expert's episodes at regular intervals of turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from perturn.extend import COUNT, Brancher, ExplorerTraits, Forecast, Prover, Trajectory


@dataclass(frozen=True)
class ExpertBranches(Brancher):
    """Resume the expert's episodes of the explored tasks at regular intervals of turns (IPR).

    Source: Xiong et al. 2024, "Watch Every Step! LLM Agent Learning via Iterative Step-Level Process Refinement"
    (IPR), arXiv:2406.11176.
    Differs: the policy that explored plays the branches. In the paper, the policy after SFT plays them in all
    iterations (`policy: sft`).
    """

    branches: Annotated[int, COUNT] = 5
    """Episodes from each turn; their first turns are the expert's."""
    every: Annotated[int, COUNT] = 1
    """Turns from one branching turn to the next; the first of an episode is its first turn plus this many."""
    policy: Prover | None = None
    """Who plays the branches: base, the model that the run begins with, or sft, the policy after SFT. None: the policy
    that explored."""

    @property
    def traits(self) -> ExplorerTraits:
        """Branches of the expert's episodes."""
        imposes = {"prover": self.policy is not None, "cut-branches": self.turns is not None}
        return ExplorerTraits(
            frozenset({"expert-branches"}),
            frozenset(name for name, holds in imposes.items() if holds),
            policy=self.policy,
            expert=True,
        )

    def check(self, turns: int, tasks: int) -> None:
        """Reject settings with which no episode is resumed, or no branch is cut."""
        self.check_turns(self.every, turns, "every")

    def begun(self, explored: Sequence[Trajectory], experts: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the expert's episodes."""
        return list(experts)

    def turns_of(self, one: Trajectory) -> Sequence[int]:
        """Return turns at equal distances."""
        return range(self.every, len(one.turns), self.every)

    def forecast(self, explored: int, turns: float, expert_turns: float) -> Forecast:
        """Return what to expect of one episode of the expert for each explored task."""
        begun = explored // self.samples
        return self.expected(begun, int((expert_turns - 1) // self.every), turns)
