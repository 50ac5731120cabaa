"""Adapter for text environments with Gymnasium's interface: `reset(seed=...)` and a `step` that returns five values.

It does not need the package `gymnasium`. A callable of the user makes the environment: a class, `gymnasium:make`, or
the `make` of a text-game library with this interface.
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
    state_key_of,
    task_seed,
)
from perturn.envs.async_worlds import WorldLoop
from perturn.errors import EnvironmentFailure
from perturn.io.user_code import load_object
from perturn.traits import EnvironmentTraits
from perturn.types import Observation, Task


class Gymnasium:
    """A text environment with Gymnasium's interface. A task is a seed.

    Three optional fields of `info` are read: `success` (bool), `valid` (bool: the action was understood) and
    `admissible_commands` (list of texts). If `success` is missing, an episode counts as solved if it terminates with a
    positive reward in its last step. An episode that the environment truncates does not count as solved. `reset`,
    `step` and `close` may be `async def`; they run in one event loop.
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
            make: Callable that returns the environment, written `module:callable`, such as `my_games:Maze` or
                `gymnasium:make`.
            seeds: Number of tasks of each split; seeds count up from 0 across the splits. None: 200 train, 100 test.
            settings: Keyword arguments of the callable.
            version: Version that follows the callable's name in the environment name of every trajectory.
        """
        self._seeds = check_seeds(seeds)
        given = dict(settings or {})
        self._loop = WorldLoop()
        maker = load_object(make)
        self._env = self._loop.result(maker(**given))
        self.played = self._env if isinstance(maker, type) else None
        """The user's object, whose class may declare protocol settings; None if `make` is not a class."""
        label = str(given.get("id") or given.get("env_id") or make.partition(":")[2])
        self.name = f"{label}-{version}" if version else label

    def tasks(self, split: str) -> Sequence[Task]:
        """Return one task per seed of the split."""
        return seed_tasks(self._seeds, split)

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start the episode of the task's seed; the argument `seed` is ignored."""
        answer = self._loop.result(self._env.reset(seed=task_seed(task)))
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise EnvironmentFailure(
                f"reset of {self.name} returned {answer!r:.60}, not (observation, info) as Gymnasium's does. Remedy: "
                "return both; older environments need a compatibility wrapper."
            )
        text, info = answer
        admissible = admissible_of(info)
        return Observation(
            as_text(text, "the observation"), state_key=state_key_of(info), admissible=admissible
        )

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
        """Close the environment if it has a method `close`, and end its event loop."""
        close = getattr(self._env, "close", None)
        try:
            if close is not None:
                self._loop.result(close())
        finally:
            self._loop.close()
