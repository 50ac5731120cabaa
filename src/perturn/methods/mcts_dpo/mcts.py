"""Explorer `mcts`: Monte Carlo tree search, in which each new episode resumes an earlier episode of its tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from perturn.extend import (
    COUNT,
    NOT_NEGATIVE,
    SEVERAL,
    ExploreInputs,
    Explorer,
    ExplorerTraits,
    Forecast,
    Job,
    Of,
    Prover,
    Trajectory,
    branches_of,
    came_back,
    came_elsewhere,
    grow,
    next_node,
    open_to,
    seed_of,
)


@dataclass(frozen=True)
class Mcts(Explorer):
    """Search a tree from each explored episode (MCTS). The trees of all tasks grow at the same time.

    Source: Xie et al. 2024, "Monte Carlo Tree Search Boosts Reasoning via Iterative Preference Learning",
    arXiv:2405.00451.
    Differs: the search uses UCT; the paper uses PUCT. The value of a step is the mean outcome alone.
    """

    simulations: Annotated[int, COUNT] = 8
    """Number of episodes of a tree, in addition to the explored episode. They are played one after another."""
    width: Annotated[int, SEVERAL] = 3
    """Number of actions to sample at a node before the search descends to one of its children."""
    exploration: Annotated[float, NOT_NEGATIVE] = 1.0
    """Exploration constant of UCT, in units of reward; >= 0. A larger value favors children with few visits."""
    of: Of = "all"
    """Explored episodes from which trees are grown. all: all episodes. failures: episodes that did not solve their
    task."""
    policy: Prover | None = None
    """Policy that plays the simulations. base: the base model of the run. sft: the policy after SFT. None: the policy
    that explored."""

    @property
    def traits(self) -> ExplorerTraits:
        """Traits of the explorer: trees, in which each episode depends on the results of earlier episodes."""
        imposes = {"some-episodes": self.of == "failures", "prover": self.policy is not None}
        return ExplorerTraits(
            frozenset({"tree"}),
            frozenset(name for name, holds in imposes.items() if holds),
            policy=self.policy,
        )

    @property
    def rounds(self) -> int:
        """Number of rounds: one for each simulation."""
        return self.simulations

    def begun(self, explored: Sequence[Trajectory], experts: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the explored episodes from which trees are grown."""
        return open_to(explored, self.of)

    def jobs(self, inputs: ExploreInputs, number: int) -> list[Job]:
        """Return the rollouts in round 0, and in a later round the next episode of each tree."""
        if number == 0:
            return super().jobs(inputs, number)
        return search_jobs(
            inputs.begun, inputs.played, self, inputs.seed, self.samples, inputs.iteration, number - 1
        )

    def counts(
        self, inputs: ExploreInputs, jobs: Sequence[Job], branches: Sequence[Trajectory]
    ) -> dict[str, float]:
        """Return `exhausted`: number of trees without a next episode in the last round.

        Such a tree is fully searched, or the environment could not restore one of its states.
        """
        return {"exhausted": len(inputs.begun) - len(jobs)}

    def forecast(self, explored: int, turns: float, expert_turns: float) -> Forecast:
        """Return the expected work if no tree is exhausted."""
        played = explored * self.simulations
        return Forecast(explored, played // (self.width - 1), played)


def search_jobs(
    explored: Sequence[Trajectory],
    played: Iterable[Trajectory],
    settings: Mcts,
    seed: int,
    samples: int = 1,
    iteration: int = 1,
    number: int = 0,
) -> list[Job]:
    """Return the job of the next episode of each tree.

    Args:
        explored: Episodes from which trees are grown.
        played: Branches of these trees, in any order. Of each tree, only branches before `number` are read, so an
            interrupted search continues as if it had not been interrupted.
        settings: Settings of the search.
        seed: Seed of the run.
        samples: Number of explored episodes per task. New episodes get larger sample numbers.
        iteration: Number of the iteration, from 1.
        number: Number of the episode in its tree, from 0.

    Returns:
        One job per tree. A tree has no job if it is fully searched, or if the environment could not restore a state.
    """
    jobs = []
    for one, by_turn in zip(explored, branches_of(explored, played), strict=True):
        sample = one.sample + samples * (1 + number)
        before = [each for found in by_turn.values() for each in found if each.sample < sample]
        if any(map(came_elsewhere, before)):
            continue
        root = grow(one, filter(came_back, before))
        node = next_node(root, settings.width, settings.exploration)
        if node is not None and node.example is not None:
            begun = replace(node.example, sample=one.sample)
            drawn = seed_of(seed, one.task.id, sample, iteration)
            jobs.append(Job(one.task, drawn, sample, begun, node.depth))
    return jobs
