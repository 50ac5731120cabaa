"""Common part of the explorers that resume episodes at turns chosen beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from perturn.config.sections import COUNT
from perturn.data.forks import Forks
from perturn.episodes.episode import Job
from perturn.episodes.seeds import seed_of
from perturn.errors import check_fit
from perturn.explore.protocol import ExploreInputs, Explorer, Forecast
from perturn.types import Trajectory, failed, succeeded

Of = Literal["all", "failures"]
"""Explored episodes that are resumed."""
Prover = Literal["base", "sft"]
"""A policy that plays branches beside the exploring policy."""


@dataclass(frozen=True)
class Brancher(Explorer):
    """Resume episodes at some of their turns, several times each."""

    branches: Annotated[int, COUNT] = 2
    """Branches at each branching turn; they share the turns before it with the resumed episode."""
    turns: Annotated[int, COUNT] | None = None
    """Most turns that a branch plays. A longer branch is left unfinished; only readers of single turns, such as
    credit `slate`, accept this. None: each is played to its end."""

    @property
    def rounds(self) -> int:
        """One."""
        return 1

    def turns_of(self, one: Trajectory) -> Sequence[int]:
        """Return the turns at which an episode is resumed, where nothing else chooses them."""
        return ()

    def choose(self, inputs: ExploreInputs) -> list[Forks]:
        """Return the turns at which each begun episode is resumed."""
        return [Forks(*one.key, tuple(self.turns_of(one)), ()) for one in inputs.begun]

    def jobs(self, inputs: ExploreInputs, number: int) -> list[Job]:
        """Return the rollouts, and then the branches."""
        if number == 0:
            return super().jobs(inputs, number)
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
        """Reject settings with which no episode is long enough to be resumed, or no branch long enough to be cut.

        Args:
            first: The first turn at which an episode may be resumed.
            turns: Turn limit of the longest task.
            setting: The setting that says `first`; empty: none does.

        Raises:
            ConfigError: Saying what to set.
        """
        name = f"explore.{setting}" if setting else "the first turn that is resumed"
        must = f"be < {turns}, the most turns of an episode, so that some are resumed"
        remedy = "" if turns > 1 else "Let episodes take two turns or more (protocol.max_turns)."
        check_fit(first < turns, name, must, first, remedy)
        must = f"be < {turns - first}, the most turns of a branch, so that some are cut"
        fits = self.turns is None or self.turns < turns - first
        check_fit(fits, "explore.turns", must, self.turns, "Or leave it out.")
        must = "be 1 at temperature 0, where all branches from a turn are alike"
        fits, remedy = (
            self.branches == 1 or self.sampling.temperature > 0,
            "Or set explore.sampling.temperature.",
        )
        check_fit(fits, "explore.branches", must, self.branches, remedy)

    def expected(self, begun: int, forks: float, turns: float) -> Forecast:
        """Return the expected work of episodes, by their turns and the number of turns at which each is resumed."""
        played = round(begun * self.branches * forks)
        return Forecast(
            begun, played // self.branches, played, min(0.5, self.turns / turns if self.turns else 0.5)
        )


@dataclass(frozen=True)
class ExploredBrancher(Brancher):
    """Resume explored episodes at some of their turns."""

    of: Of = "all"
    """Episodes that are resumed: all explored ones, or those that did not solve their task."""

    def begun(self, explored: Sequence[Trajectory], experts: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the explored episodes that are resumed."""
        return open_to(explored, self.of)

    def imposed(self, policy: Prover | None) -> frozenset[str]:
        """Return the properties of its branches that readers must take, where a policy plays them."""
        found = {
            "some-episodes": self.of == "failures",
            "prover": policy is not None,
            "cut-branches": self.turns,
        }
        return frozenset(name for name, holds in found.items() if holds)


def open_to(explored: Iterable[Trajectory], of: Of) -> list[Trajectory]:
    """Return the explored episodes that did not FAIL: all of them, or those that did not solve their task."""
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
    """Return the branches of some episodes: each begins with the first turns of an episode.

    Args:
        begun: Episodes that are resumed, in any order.
        chosen: Turns at which each is resumed, by its key.
        seed: Of the run.
        branches: Episodes from each turn.
        samples: Explored episodes of a task, whose numbers the branches do not take.
        iteration: From 1.
        turns: Turns that a branch plays, at most; None: all.

    Returns:
        One job an episode, in the order of the keys of `begun`, of turns and of samples; the seed of each depends on
        the run's seed, the task, its own number and the iteration alone.
    """
    jobs = []
    for one in sorted(begun, key=lambda one: one.key):
        for number, kept in enumerate(kept for kept in chosen[one.key] for _ in range(branches)):
            sample = one.sample + samples * (1 + number)
            jobs.append(
                Job(one.task, seed_of(seed, one.task.id, sample, iteration), sample, one, kept, turns)
            )
    return jobs
