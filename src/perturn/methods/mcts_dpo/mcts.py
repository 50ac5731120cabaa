"""Explorer `mcts`: every next episode of a tree resumes one of its episodes where the last ones say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from perturn.extend import (
    COUNT,
    SEVERAL,
    Bound,
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
    """Search the tree of each explored episode (MCTS); the trees of all tasks grow at the same time.

    Source: Xie et al. 2024, "Monte Carlo Tree Search Boosts Reasoning via Iterative Preference Learning",
    arXiv:2405.00451.
    Differs: the search uses UCT, and the paper PUCT. The value of a step is the mean outcome alone.
    """

    simulations: Annotated[int, COUNT] = 8
    """Episodes of a tree, in addition to the explored episode; they are played one after another."""
    width: Annotated[int, SEVERAL] = 3
    """Actions to draw from a state before the search descends to one of its children."""
    exploration: Annotated[float, Bound(least=0)] = 1.0
    """UCT's constant, in units of reward: the weight of rarely tried children in addition to the mean score."""
    of: Of = "all"
    """Episodes that trees are grown from: all explored ones, or those that did not solve their task."""
    policy: Prover | None = None
    """Who plays the simulations: base, the model that the run begins with, or sft, the policy after SFT. None: the
    policy that explored."""

    @property
    def traits(self) -> ExplorerTraits:
        """Trees; where an episode begins depends on how earlier ones ended."""
        imposes = {"some-episodes": self.of == "failures", "prover": self.policy is not None}
        return ExplorerTraits(
            frozenset({"tree"}),
            frozenset(name for name, holds in imposes.items() if holds),
            policy=self.policy,
        )

    @property
    def rounds(self) -> int:
        """One for each simulation."""
        return self.simulations

    def begun(self, explored: Sequence[Trajectory], experts: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the explored episodes that trees are grown from."""
        return open_to(explored, self.of)

    def jobs(self, inputs: ExploreInputs, number: int) -> list[Job]:
        """Return the rollouts, and then the next episode of each tree."""
        if number == 0:
            return super().jobs(inputs, number)
        return search_jobs(
            inputs.begun, inputs.played, self, inputs.seed, self.samples, inputs.iteration, number - 1
        )

    def counts(
        self, inputs: ExploreInputs, jobs: Sequence[Job], branches: Sequence[Trajectory]
    ) -> dict[str, float]:
        """Return `exhausted`: trees with nothing left to try in the last round, or whose world did not come back."""
        return {"exhausted": len(inputs.begun) - len(jobs)}

    def forecast(self, explored: int, turns: float, expert_turns: float) -> Forecast:
        """Return what to expect if no tree is exhausted."""
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
    """Return the next episode of each tree.

    Args:
        explored: Episodes that trees are grown from.
        played: Branches of any of these trees, in any order; of a tree, branches before `number` are
            read, so that a tree which was interrupted grows on as it would have.
        settings: How to search.
        seed: Of the run.
        samples: Explored episodes of a task, whose numbers the new ones do not take.
        iteration: From 1.
        number: Of the episode in its tree, from 0.

    Returns:
        One job a tree in which there is something left to try, and whose world always came back.
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
