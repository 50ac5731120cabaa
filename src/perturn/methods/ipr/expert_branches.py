"""Explorer `expert-branches`: branches of the expert's episodes, at regular intervals of turns."""

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
    """Number of branches from each branching turn. The expert played the turns before."""
    every: Annotated[int, COUNT] = 1
    """Number of turns from one branching turn to the next. No branch starts at the first turn."""
    policy: Prover | None = None
    """Policy that plays the branches. base: the base model of the run. sft: the policy after SFT. None: the policy that
    explored."""

    @property
    def traits(self) -> ExplorerTraits:
        """Traits of the explorer: branches of the expert's episodes."""
        imposes = {"prover": self.policy is not None, "cut-branches": self.turns is not None}
        return ExplorerTraits(
            frozenset({"expert-branches"}),
            frozenset(name for name, holds in imposes.items() if holds),
            policy=self.policy,
            expert=True,
        )

    def check(self, turns: int, tasks: int) -> None:
        """Reject settings with which no episode is resumed, or the turn limit of branches has no effect."""
        self.check_turns(self.every, turns, "every")

    def begun(self, explored: Sequence[Trajectory], experts: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the episodes to resume: all episodes of the expert."""
        return list(experts)

    def turns_of(self, one: Trajectory) -> Sequence[int]:
        """Return the branching turns of an episode: every `every`-th turn."""
        return range(self.every, len(one.turns), self.every)

    def forecast(self, explored: int, turns: float, expert_turns: float) -> Forecast:
        """Return the expected work, with one expert's episode per explored task."""
        begun = explored // self.samples
        return self.expected(begun, int((expert_turns - 1) // self.every), turns)
