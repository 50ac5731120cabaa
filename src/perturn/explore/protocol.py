"""Interface of explorers: frozen dataclasses that choose which episodes to play in an iteration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from perturn.config.explorer_settings import ExploreSettings
from perturn.data.forks import Forks
from perturn.episodes.episode import Job
from perturn.episodes.seeds import make_jobs
from perturn.errors import check_fit, check_type
from perturn.types import Task, Trajectory


@dataclass(frozen=True)
class ExploreInputs:
    """Inputs of an explorer. Episodes are sorted by task and sample, except in `played`."""

    seed: int
    """Seed of the run."""
    iteration: int = 1
    """Number of the iteration, from 1."""
    tasks: Sequence[Task] = ()
    """Tasks of the iteration."""
    left: Sequence[Trajectory] = ()
    """Unfinished episodes of the previous iteration, for an explorer with the trait `resumes_earlier`."""
    explored: Sequence[Trajectory] = ()
    """Rollouts of the iteration, without FAILED episodes."""
    begun: Sequence[Trajectory] = ()
    """Episodes that `Explorer.begun` returned. If the explorer needs the distance to success, each turn has it."""
    read: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Name of a quantity in `needs` -> one entry per explored episode."""
    chosen: Sequence[Forks] = ()
    """Branching turns that `Explorer.choose` returned, in this process or before the run was resumed."""
    played: Sequence[Trajectory] = ()
    """Episodes of earlier rounds, in any order. After resuming a run, it may include episodes of the current round."""


class Forecast(NamedTuple):
    """Expected numbers of episodes and turns in the rounds after the rollouts."""

    begun: int = 0
    """Number of episodes that are resumed."""
    points: int = 0
    """Number of branching turns in all resumed episodes."""
    played: int = 0
    """Number of branches."""
    share: float = 0.5
    """Share of a branch's turns that the branch plays itself, rather than shares with the resumed episode."""


@dataclass(frozen=True)
class Explorer(ExploreSettings):
    """Chooses the episodes of an iteration: rollouts, and then branches, which resume episodes at some of their turns.

    To add an explorer, extend this class with a frozen dataclass, and override the members that differ from plain
    rollouts. An explorer has the settings of `ExploreSettings` and its own settings. It only returns jobs: it does not
    play episodes or load models itself.

    - `traits`: Kinds of branches that it `provides`, and properties that credits and row makers must accept
      (`imposes`).
    - `needs`: Quantities of the explored episodes that it reads.
    - `rounds`: Number of rounds of branches.
    - `check`: Rejects settings with which no episode would be resumed.
    - `begun`: Returns the episodes to resume.
    - `choose`: Returns their branching turns.
    - `jobs`: Returns the episodes of a round.
    - `counts`: Returns numbers about the finished rounds, for the run's manifest.
    - `forecast`: Returns the expected number of episodes, for the estimate of `--dry-run`.

    The choice of a branching turn may depend on the episode up to the turn's prompt, on other episodes and on chance.
    It must not depend on later turns of the episode. Otherwise averages over branches are biased by how that episode
    ended.
    """

    def check(self, turns: int, tasks: int) -> None:
        """Reject settings with which no episode would be resumed.

        Args:
            turns: Largest turn limit of the tasks.
            tasks: Number of tasks of an iteration.

        Raises:
            ConfigError: If a setting is unsuitable. The message says what to set.
        """

    def begun(self, explored: Sequence[Trajectory], experts: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the episodes to resume, without FAILED episodes.

        Args:
            explored: Rollouts of the iteration.
            experts: The expert's best episode of each task that the expert solved, for an explorer that reads them.
        """
        return []

    def choose(self, inputs: ExploreInputs) -> list[Forks]:
        """Return the branching turns of episodes in `inputs.begun`.

        Episodes without an entry get no branches. Entries of other explored episodes are ignored.
        """
        return []

    def jobs(self, inputs: ExploreInputs, number: int) -> list[Job]:
        """Return the episodes to play in a round. Round 0 has the rollouts.

        The seed of an episode depends only on the run's seed, the task, the sample number and the iteration. Episodes
        of the same task have different sample numbers.
        """
        return make_jobs(inputs.tasks, inputs.seed, self.samples, inputs.iteration)

    def counts(
        self, inputs: ExploreInputs, jobs: Sequence[Job], branches: Sequence[Trajectory]
    ) -> dict[str, float]:
        """Return numbers about the rounds after the rollouts, by name.

        Args:
            inputs: Inputs that `jobs` got in the last round.
            jobs: Jobs of the last round.
            branches: Episodes of all rounds after the rollouts.
        """
        return {}

    def forecast(self, explored: int, turns: float, expert_turns: float) -> Forecast:
        """Return the expected numbers of episodes in the rounds after the rollouts.

        Args:
            explored: Number of rollouts in an iteration.
            turns: Average number of turns of a rollout.
            expert_turns: Average number of turns of an expert's episode.
        """
        return Forecast()


def jobs_of(explorer: Explorer, inputs: ExploreInputs, number: int) -> list[Job]:
    """Return the episodes to play in a round of an explorer, and check what its `jobs` returned.

    Raises:
        ConfigError: If it is no list of jobs, or two jobs are of one task and one sample number.
    """
    jobs, name = explorer.jobs(inputs, number), f"the jobs of explorer {type(explorer).__name__}"
    check_type(name, jobs, list | tuple, "a list")
    strange = next((job for job in jobs if not isinstance(job, Job)), None)
    check_fit(strange is None, name, "be of class Job, as make_jobs returns them", strange)
    numbers = Counter((job.task.id, job.sample) for job in jobs)
    twice = next((key for key, count in numbers.items() if count > 1), None)
    check_fit(twice is None, name, "have different sample numbers for each task", twice)
    return list(jobs)
