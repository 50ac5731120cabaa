"""Stop a run if too many episodes fail, since the environment or the engine must then be broken."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from perturn.errors import EnvironmentFailure
from perturn.types import Trajectory, failed, unjudged

_FIRST = 8
"""Episodes that end before they are judged, or as many as are played at a time: those that fail may end first."""


class Failures:
    """Counts which of the last episodes of a file failed.

    Args:
        most: Share that may fail.
        total: Episodes the file will hold in the end.
        concurrency: Episodes played at the same time.
    """

    def __init__(self, most: float, total: int, concurrency: int = 1) -> None:
        self._most = most
        self._first = min(total, max(_FIRST, concurrency))
        self._errors: deque[str | None] = deque(maxlen=2 * max(_FIRST, concurrency))

    def add(self, trajectories: Iterable[Trajectory]) -> Failures:
        """Count these, in the order in which they ended."""
        for one in trajectories:
            self._errors.append(one.error or "no reason" if failed(one) and not unjudged(one) else None)
        return self

    def restart(self, trajectories: Iterable[Trajectory]) -> None:
        """Reset the counts, and count these."""
        self._errors.clear()
        self.add(trajectories)

    @property
    def too_many(self) -> bool:
        """Whether more failed than may."""
        failed = sum(error is not None for error in self._errors)
        return len(self._errors) >= self._first and failed > self._most * len(self._errors)

    def refuse(self, what: str) -> None:
        """Stop if the limit of failed episodes, `what` by name, is exceeded.

        Raises:
            EnvironmentFailure: With the commonest error.
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
