"""Explorer `window`: each iteration plays a limited number of turns of an episode; the next iteration resumes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from perturn.extend import COUNT, ExploreInputs, Explorer, ExplorerTraits, Job, check_fit, seed_of


@dataclass(frozen=True)
class Window(Explorer):
    """Play at most `turns` turns of an episode per iteration; longer episodes resume in the next iteration (T-PPO).

    Each iteration trains the policy on the turns that it played.

    Source: "Truncated Proximal Policy Optimization" (T-PPO), 2025, by its abstract.
    Differs: a window counts turns; T-PPO cuts an answer after a number of tokens. To resume an episode, its recorded
    actions are replayed in the environment.
    """

    turns: Annotated[int, COUNT] = 10
    """Maximum number of turns of an episode in one iteration."""

    @property
    def traits(self) -> ExplorerTraits:
        """Traits of the explorer: episodes may stay unfinished, and the next iteration resumes them."""
        return ExplorerTraits(imposes=frozenset({"unfinished"}), resumes_earlier=True)

    def check(self, turns: int, tasks: int) -> None:
        """Reject a window that is not smaller than the turn limit, since it would cut no episode."""
        must = f"be < {turns}, the most turns of an episode, so that an episode is cut"
        check_fit(self.turns < turns, "explore.turns", must, self.turns, "Or take explore.name=rollouts.")

    def jobs(self, inputs: ExploreInputs, number: int) -> list[Job]:
        """Return jobs for the unfinished episodes of the previous iteration, followed by jobs for new episodes.

        The sample number of a resumed episode is its old number plus `samples`. So it differs from the numbers of new
        episodes, and of episodes from other iterations.
        """
        resumed = [
            Job(one.task, seed_of(inputs.seed, one.task.id, sample, inputs.iteration), sample, one)
            for one in sorted(inputs.left, key=lambda one: one.key)
            for sample in [one.sample + self.samples]
        ]
        return [replace(job, window=self.turns) for job in (*resumed, *super().jobs(inputs, number))]
