"""Text environments with Gymnasium's interface: `reset(seed=...)` and a `step` that returns five values.

Nothing is installed for it: what is adapted is made by a callable of the user's, be it a class, `gymnasium:make`, or
the `make` of a library of text games that keeps the interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from perturn.bounds import CODE, MAYBE_PATH
from perturn.envs.adapter_values import (
    admissible_of,
    as_number,
    as_text,
    check_seeds,
    outcome_of,
    seed_tasks,
    task_seed,
)
from perturn.envs.async_worlds import WorldLoop
from perturn.envs.load_environment import load_object
from perturn.errors import EnvironmentFailure
from perturn.traits import EnvironmentTraits
from perturn.types import Observation, Task


class Gymnasium:
    """A text environment with Gymnasium's interface. A task is a seed.

    Fields of the `info` of `reset` and `step` that are read, if present: `success` (bool), `valid` (bool: was the
    action understood) and `admissible_commands` (texts). Without `success`, an episode that ends on its own with a
    positive reward in its last step counts as solved; an episode that the environment cuts off (`truncated`) does not.
    `reset`, `step` and `close` may be `async def`; they run in one event loop.
    """

    traits: ClassVar[EnvironmentTraits] = EnvironmentTraits(adapts=True)

    def __init__(
        self,
        make: Annotated[str, CODE],
        seeds: Mapping[str, int] | None = None,
        settings: Annotated[Mapping[str, Any] | None, MAYBE_PATH] = None,
        version: str = "",
    ) -> None:
        """Make the environment.

        Args:
            make: `module:callable` that returns it, such as `my_games:Maze` or `gymnasium:make`.
            seeds: Number of tasks of each split; seeds are counted up through the splits. None: 200 train, 100 test.
            settings: Keyword arguments of the callable.
            version: Stamped on every trajectory after the callable's name.
        """
        self._seeds = check_seeds(seeds)
        given = dict(settings or {})
        self._loop = WorldLoop()
        maker = load_object(make)
        self._env = self._loop.result(maker(**given))
        self.played = self._env if isinstance(maker, type) else None
        """The user's object, whose class may declare rules; None if wrappers of other packages are around it."""
        label = str(given.get("id") or given.get("env_id") or make.partition(":")[2])
        self.name = f"{label}-{version}" if version else label

    def tasks(self, split: str) -> Sequence[Task]:
        """Return one task a seed."""
        return seed_tasks(self._seeds, split)

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start the episode of the task's seed; the policy's own seed plays no part."""
        answer = self._loop.result(self._env.reset(seed=task_seed(task)))
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise EnvironmentFailure(
                f"reset of {self.name} returned {answer!r:.60}, not (observation, info) as Gymnasium's does. Remedy: "
                "return both; older environments need a compatibility wrapper."
            )
        text, info = answer
        return Observation(as_text(text, "the observation"), admissible=admissible_of(info))

    def step(self, action: str) -> Observation:
        """Take one action."""
        answer = self._loop.result(self._env.step(action))
        if not isinstance(answer, tuple) or len(answer) != 5:
            raise EnvironmentFailure(
                f"step of {self.name} returned {answer!r:.60}, not (observation, reward, terminated, truncated, info). "
                "Remedy: return these five; four values are the interface before Gymnasium."
            )
        text, paid, terminated, truncated, info = answer
        said, reward = as_text(text, "the observation"), as_number(paid, "the reward")
        return outcome_of(said, reward, bool(terminated), bool(truncated), info)

    def close(self) -> None:
        """Close the environment, if it can be closed."""
        close = getattr(self._env, "close", None)
        try:
            if close is not None:
                self._loop.result(close())
        finally:
            self._loop.close()
