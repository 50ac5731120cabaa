"""Base classes of explorers that resume episodes at chosen turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from perturn.config.explorer_settings import ExplorerTraits
from perturn.config.sections import COUNT
from perturn.data.forks import Forks
from perturn.episodes.episode import Job
from perturn.episodes.seeds import seed_of
from perturn.errors import check_fit, check_type
from perturn.explore.protocol import ExploreInputs, Explorer, Forecast
from perturn.types import Trajectory, failed, succeeded

Of = Literal["all", "failures"]
"""Explored episodes to resume: all, or only the episodes that did not solve their task."""
Prover = Literal["base", "sft"]
"""Policy that plays branches instead of the exploring policy: the model before training, or the policy after SFT."""


@dataclass(frozen=True)
class Brancher(Explorer):
    """Resume episodes at some of their turns, several times at each turn."""

    branches: Annotated[int, COUNT] = 2
    """Number of branches at each branching turn. A branch shares all earlier turns with the resumed episode."""
    turns: Annotated[int, COUNT] | None = None
    """Largest number of turns that a branch plays before it is cut off. Only credits of single turns, such as `slate`,
    accept cut branches. None: play each branch to its end."""

    @property
    def rounds(self) -> int:
        """Number of rounds of branches: 1."""
        return 1

    def turns_of(self, one: Trajectory) -> Sequence[int]:
        """Return the branching turns of an episode. Override this method, or `choose`."""
        return ()

    def choose(self, inputs: ExploreInputs) -> list[Forks]:
        """Return the branching turns of episodes in `inputs.begun`; other episodes get no branches."""
        return [Forks(*one.key, self._checked_turns(one), ()) for one in inputs.begun]

    def _checked_turns(self, one: Trajectory) -> tuple[int, ...]:
        """Return the branching turns of an episode, and check what `turns_of` returned.

        Raises:
            ConfigError: If it is no sequence of indices of turns.
        """
        turns, name = self.turns_of(one), f"turns_of of explorer {type(self).__name__}"
        check_type(name, turns, Sequence, "a sequence of turns")
        for turn in turns:
            fits = isinstance(turn, int) and 0 <= turn < len(one.turns)
            check_fit(fits, name, f"have turns from 0 to {len(one.turns) - 1} of an episode", turn)
        return tuple(turns)

    def jobs(self, inputs: ExploreInputs, number: int) -> list[Job]:
        """Return the rollouts in round 0, and the branches in round 1.

        Raises:
            ConfigError: If `choose` returned turns of an unknown episode.
        """
        if number == 0:
            return super().jobs(inputs, number)
        known = {one.key for one in (*inputs.begun, *inputs.explored)}
        strange = next((each.key for each in inputs.chosen if each.key not in known), None)
        name = f"choose of explorer {type(self).__name__}"
        check_fit(strange is None, name, "return turns of episodes in inputs.begun", strange)
        return branch_jobs(
            inputs.begun,
            {each.key: each.turns for each in inputs.chosen},
            inputs.seed,
            branches=self.branches,
            samples=self.samples,
            iteration=inputs.iteration,
            turns=self.turns,
        )

    def check_turns(self, first: int, turns: int, setting: str = "") -> None:
        """Reject settings with which no episode can branch, `turns` shortens no branch, or all branches are equal.

        Args:
            first: First turn at which an episode may be resumed.
            turns: Largest turn limit of the tasks.
            setting: Name of the setting that determines `first`; empty if there is none.

        Raises:
            ConfigError: If a setting is unsuitable. The message says what to set.
        """
        name = f"explore.{setting}" if setting else "the first turn that is resumed"
        must = f"be < {turns}, the most turns of an episode, so that some are resumed"
        remedy = "" if turns > 1 else "Let episodes take two turns or more (protocol.max_turns)."
        check_fit(first < turns, name, must, first, remedy)
        must = f"be < {turns - first}, the most turns of a branch, so that some are cut"
        fits = self.turns is None or self.turns < turns - first
        check_fit(fits, "explore.turns", must, self.turns, "Or leave it out.")
        must = "be 1 at temperature 0, where all branches from a turn are equal"
        fits, remedy = (
            self.branches == 1 or self.sampling.temperature > 0,
            "Or set explore.sampling.temperature.",
        )
        check_fit(fits, "explore.branches", must, self.branches, remedy)

    def expected(self, begun: int, forks: float, turns: float) -> Forecast:
        """Return the expected number of branches and of their turns.

        Args:
            begun: Number of episodes that are resumed.
            forks: Average number of branching turns of an episode.
            turns: Average number of turns of an episode.
        """
        played = round(begun * self.branches * forks)
        return Forecast(
            begun, played // self.branches, played, min(0.5, self.turns / turns if self.turns else 0.5)
        )


@dataclass(frozen=True)
class ExploredBrancher(Brancher):
    """Resume explored episodes at some of their turns."""

    of: Of = "all"
    """Explored episodes to resume: `all`, or `failures` for the episodes that did not solve their task."""

    @property
    def traits(self) -> ExplorerTraits:
        """Traits of the explorer; by default it provides branches, played by the exploring policy."""
        return ExplorerTraits(frozenset({"branches"}), self.imposed(None))

    def begun(self, explored: Sequence[Trajectory], experts: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the explored episodes to resume."""
        return open_to(explored, self.of)

    def imposed(self, policy: Prover | None) -> frozenset[str]:
        """Return the properties of the branches that credits and row makers must accept.

        Args:
            policy: Policy that plays the branches; None: the exploring policy.
        """
        found = {
            "some-episodes": self.of == "failures",
            "prover": policy is not None,
            "cut-branches": self.turns,
        }
        return frozenset(name for name, holds in found.items() if holds)


def open_to(explored: Iterable[Trajectory], of: Of) -> list[Trajectory]:
    """Return the explored episodes to resume, without FAILED episodes: all, or those that did not solve their task."""
    return [one for one in explored if not failed(one) and not (of == "failures" and succeeded(one))]


def branch_jobs(
    begun: Iterable[Trajectory],
    chosen: Mapping[tuple[str, int], Sequence[int]],
    seed: int,
    *,
    branches: int = 1,
    samples: int = 1,
    iteration: int = 1,
    turns: int | None = None,
) -> list[Job]:
    """Return the jobs that play branches. A branch begins with the first turns of an earlier episode.

    Args:
        begun: Episodes to resume, in any order.
        chosen: Key of an episode -> its branching turns. An episode that is missing gets no branches.
        seed: Seed of the run.
        branches: Number of branches at each branching turn.
        samples: Number of explored episodes per task; sample numbers of branches do not collide with theirs.
        iteration: Number of the iteration, from 1.
        turns: Largest number of turns that a branch plays; None: no limit.

    Returns:
        One job per branch, sorted by the episode's key, the branching turn and the sample number. Each job's seed
        depends only on the run's seed, the task, the sample number and the iteration.
    """
    jobs = []
    for one in sorted(begun, key=lambda one: one.key):
        for number, kept in enumerate(kept for kept in chosen.get(one.key, ()) for _ in range(branches)):
            sample = one.sample + samples * (1 + number)
            jobs.append(
                Job(one.task, seed_of(seed, one.task.id, sample, iteration), sample, one, kept, turns)
            )
    return jobs
