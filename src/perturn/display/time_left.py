"""Rate and time left of work whose parts end in bursts, measured in turns or tokens instead of whole parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

_BURST = 0.5
"""Seconds within which amounts count as one burst."""
_SPAN = 30.0
"""Seconds over which a rate is taken, at least; later it is the last half of the time."""


class Pace:
    """The rate at which an amount grows, from burst to burst.

    A rate that is taken at any moment falls between two bursts and jumps at each. Here both ends of the time that is
    looked at are ends of bursts, unless the next burst is later than any was before.
    """

    def __init__(self, began: float) -> None:
        """Begin with an amount of 0 at a moment, in seconds of any clock."""
        self._began = self._noted = began
        self._bursts: deque[tuple[float, float, float]] = deque([(began, began, 0.0)])

    def note(self, now: float, amount: float) -> None:
        """Note the amount that is reached; an amount that did not grow is ignored."""
        start, _, before = self._bursts[-1]
        if amount <= before:
            return
        self._noted = now
        if len(self._bursts) > 1 and now - start < _BURST:
            self._bursts[-1] = start, now, amount
        else:
            self._bursts.append((now, now, amount))
        oldest = now - max(_SPAN, (now - self._began) / 2)
        while len(self._bursts) > 2 and self._bursts[1][1] <= oldest:
            self._bursts.popleft()

    def rate(self, now: float) -> float | None:
        """Return the amount a second; None before anything has grown."""
        bursts = list(self._bursts)
        if len(bursts) < 2:
            return None
        longest = max(later[0] - earlier[1] for earlier, later in pairwise(bursts))
        (_, since, before), until = bursts[0], max(self._noted, now - longest)
        return (bursts[-1][2] - before) / max(until - since, 1e-9)

    def seconds_left(self, now: float, left: float) -> float | None:
        """Return the time that a further amount takes; None before a rate is known."""
        rate = self.rate(now)
        return None if rate is None else max(0.0, left / rate - min(now - self._noted, 1 / rate))


class Effort(Protocol):
    """Finer measure of work whose items are too coarse."""

    unit: str
    """Such as `turns`."""

    @property
    def amount(self) -> float:
        """Done since the work began."""

    @property
    def left(self) -> float:
        """Still to do, as far as that can be told now."""


class Tokens:
    """Tokens of optimizer steps, counted as they pass, so that a long step is seen to move."""

    unit = "tokens"

    def __init__(self, passed: Callable[[], int], steps: int, a_step: float) -> None:
        """Begin before a step.

        Args:
            passed: Returns the tokens that have passed since the beginning.
            steps: Steps to do.
            a_step: Tokens of a step, as far as that is known before the first one.
        """
        self._passed, self._steps, self._a_step = passed, steps, a_step
        self._done, self._at_step = 0, 0

    def stepped(self) -> None:
        """Take note of the end of a step."""
        self._done, self._at_step = self._done + 1, self._passed()

    @property
    def amount(self) -> float:
        """Tokens passed."""
        return float(self._passed())

    @property
    def left(self) -> float:
        """Tokens of the steps that are left, as many each as the steps before had."""
        a_step = self._at_step / self._done if self._done else self._a_step
        begun = min(self._passed() - self._at_step, a_step)
        return max(0.0, a_step * (self._steps - self._done) - begun)
