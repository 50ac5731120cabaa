"""Explorer `window`: an episode plays some turns per iteration, and goes on in the next one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from perturn.extend import COUNT, ExploreInputs, Explorer, ExplorerTraits, Job, check_fit, seed_of


@dataclass(frozen=True)
class Window(Explorer):
    """Play at most some turns of an episode in one iteration; longer episodes resume in the next iteration (T-PPO).

    The policy learns from the turns that were played in the iteration.

    Source: "Truncated Proximal Policy Optimization" (T-PPO), 2025, by its abstract.
    Differs: a window counts turns; T-PPO cuts an answer after a number of tokens. An episode resumes by replay in
    its environment.
    """

    turns: Annotated[int, COUNT] = 10
    """Turns of an episode in one iteration, at most."""

    @property
    def traits(self) -> ExplorerTraits:
        """Episodes may be unfinished, and unfinished ones are resumed in the next iteration."""
        return ExplorerTraits(imposes=frozenset({"unfinished"}), resumes_earlier=True)

    def check(self, turns: int, tasks: int) -> None:
        """Reject a window that cuts no episode."""
        must = f"be < {turns}, the most turns of an episode, so that an episode is cut"
        check_fit(self.turns < turns, "explore.turns", must, self.turns, "Or take explore.name=rollouts.")

    def jobs(self, inputs: ExploreInputs, number: int) -> list[Job]:
        """Return the episodes that the iteration before left unfinished, and then the new ones.

        A resumed episode takes its own number plus `samples`, so that new episodes and episodes that began in
        another iteration have numbers of their own.
        """
        resumed = [
            Job(one.task, seed_of(inputs.seed, one.task.id, sample, inputs.iteration), sample, one)
            for one in sorted(inputs.left, key=lambda one: one.key)
            for sample in [one.sample + self.samples]
        ]
        return [replace(job, window=self.turns) for job in (*resumed, *super().jobs(inputs, number))]
