"""Stop a run if too many episodes are FAILED, since the environment or the engine is then likely broken."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from perturn.errors import EnvironmentFailure
from perturn.types import Trajectory, failed, unjudged

_FIRST = 8
"""Smallest number of ended episodes before the limit applies, since FAILED episodes may end first."""


class Failures:
    """Counts the FAILED episodes among the last episodes of a file.

    Args:
        most: Largest fraction of FAILED episodes.
        total: Number of episodes that the file will hold.
        concurrency: Number of episodes played at the same time.
    """

    def __init__(self, most: float, total: int, concurrency: int = 1) -> None:
        self._most = most
        self._first = min(total, max(_FIRST, concurrency))
        self._errors: deque[str | None] = deque(maxlen=2 * max(_FIRST, concurrency))

    def add(self, trajectories: Iterable[Trajectory]) -> Failures:
        """Count trajectories, in the order in which they ended."""
        for one in trajectories:
            self.note(one.error or "no reason" if failed(one) and not unjudged(one) else None)
        return self

    def note(self, error: str | None) -> None:
        """Count an episode by its error; None: it is not FAILED."""
        self._errors.append(error)

    def restart(self, trajectories: Iterable[Trajectory]) -> None:
        """Reset the counts, then count the given trajectories."""
        self._errors.clear()
        self.add(trajectories)

    @property
    def too_many(self) -> bool:
        """Whether more episodes are FAILED than the limit allows."""
        failed = sum(error is not None for error in self._errors)
        return len(self._errors) >= self._first and failed > self._most * len(self._errors)

    def refuse(self, what: str) -> None:
        """Raise an error if too many episodes are FAILED; `what` names the episodes.

        Raises:
            EnvironmentFailure: If the limit is exceeded; names the commonest error.
        """
        if not self.too_many:
            return
        errors = Counter(error for error in self._errors if error is not None)
        error, times = errors.most_common(1)[0]
        raise EnvironmentFailure(
            f"{what}: {errors.total()} of the last {len(self._errors)} episodes failed, {times} of them with: "
            f"{error:.500} Mend that, then give the same command again: failed episodes are played again. "
            f"worlds.max_failed ({self._most:g}) is the share that may fail."
        )
