"""Explorer: a frozen dataclass that says which episodes of an iteration are played."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from perturn.config.explorer_settings import ExploreSettings
from perturn.data.forks import Forks
from perturn.episodes.episode import Job
from perturn.episodes.seeds import make_jobs
from perturn.types import Task, Trajectory


@dataclass(frozen=True)
class ExploreInputs:
    """Inputs of an explorer. All episodes are sorted by task and sample."""

    seed: int
    """Seed of the run."""
    iteration: int = 1
    """From 1."""
    tasks: Sequence[Task] = ()
    """Tasks of the iteration."""
    left: Sequence[Trajectory] = ()
    """Unfinished episodes of the iteration before, for an explorer that `resumes_earlier`."""
    explored: Sequence[Trajectory] = ()
    """Rollouts of the iteration that did not FAIL."""
    begun: Sequence[Trajectory] = ()
    """Episodes that `Explorer.begun` returned, with the distance to success of their turns where it is needed."""
    read: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """The other `needs`, by name: an entry for each explored episode."""
    chosen: Sequence[Forks] = ()
    """Turns that `Explorer.choose` returned, perhaps in an earlier call that was stopped."""
    played: Sequence[Trajectory] = ()
    """Episodes of the rounds before, in any order; perhaps some of this round too, of a call that was stopped."""


class Forecast(NamedTuple):
    """Expected amount of play in the rounds after the rollouts."""

    begun: int = 0
    """Episodes that are resumed."""
    points: int = 0
    """Turns of these where new episodes begin."""
    played: int = 0
    """New episodes."""
    share: float = 0.5
    """Share of its turns that a new episode plays itself."""


@dataclass(frozen=True)
class Explorer(ExploreSettings):
    """Gathers the episodes of an iteration: rollouts, and then branches, which resume episodes at some of their turns.

    Extend this class with a frozen dataclass to add an explorer, and override what differs from plain rollouts. An
    explorer has the settings of `ExploreSettings` and its own. It plays nothing and opens no model.

    - `traits`: what the episodes are good for (`provides`), and what their readers must take (`imposes`).
    - `needs`: quantities of the explored episodes that it reads.
    - `rounds`: how often it is asked for branches.
    - `check`: rejects settings with which nothing would be resumed.
    - `begun`: the episodes that are resumed.
    - `choose`: the turns at which they are resumed.
    - `jobs`: the episodes of a round.
    - `counts`: figures on a finished round, for the run's manifest.
    - `forecast`: how many episodes to expect, for the estimate of `--dry-run`.

    Whether a turn is chosen may depend on the episode up to its prompt, on other episodes and on chance, but not on
    what came after. Only then is an average over branches no guess of how the explored episode ends.
    """

    def check(self, turns: int, tasks: int) -> None:
        """Reject settings with which nothing would be resumed.

        Args:
            turns: Turn limit of the longest task.
            tasks: Tasks of an iteration.

        Raises:
            ConfigError: Saying what to set.
        """

    def begun(self, explored: Sequence[Trajectory], experts: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the episodes that are resumed, without those that FAILED.

        Args:
            explored: Rollouts of the iteration.
            experts: The expert's best episode of each task that he solved, for an explorer that reads these.
        """
        return []

    def choose(self, inputs: ExploreInputs) -> list[Forks]:
        """Return the turns at which episodes are resumed, one entry per episode."""
        return []

    def jobs(self, inputs: ExploreInputs, number: int) -> list[Job]:
        """Return the episodes of a round; round 0 are the rollouts.

        The seed of an episode depends on the run's seed, its task, its own number and the iteration alone, and no two
        episodes of a task have one number.
        """
        return make_jobs(inputs.tasks, inputs.seed, self.samples, inputs.iteration)

    def counts(
        self, inputs: ExploreInputs, jobs: Sequence[Job], branches: Sequence[Trajectory]
    ) -> dict[str, float]:
        """Return figures on the rounds after the rollouts.

        Args:
            inputs: As `jobs` got them.
            jobs: Of the last round.
            branches: All episodes of these rounds.
        """
        return {}

    def forecast(self, explored: int, turns: float, expert_turns: float) -> Forecast:
        """Return what to expect of the rounds after the rollouts.

        Args:
            explored: Rollouts of an iteration.
            turns: Turns of one of them, on average.
            expert_turns: Turns of an expert's episode, on average.
        """
        return Forecast()
