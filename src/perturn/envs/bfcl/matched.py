"""The reward `f1`: how well the calls of an episode match the gold calls of its task."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from perturn.episodes.tool_calls import ToolCall, call_similarity
from perturn.stats.matching import hard_matches


class Matched:
    """Calls of an episode so far, and their F1 against gold calls.

        F1 = 2 S / (P + G)

    P and G are the numbers of calls and of gold calls, and S is the largest sum of similarities of calls and gold calls
    that are matched one to one, whatever their order.
    """

    def __init__(self, gold: Sequence[ToolCall]) -> None:
        """Begin without calls.

        Args:
            gold: At least one.
        """
        self._gold = gold
        self._similarity: list[list[float]] = []
        self.f1 = 0.0
        """In [0, 1]."""

    def add(self, calls: Sequence[ToolCall]) -> float:
        """Take calls in; returns what F1 rose by, which is below 0 where it fell."""
        before = self.f1
        self._similarity += [[call_similarity(call, wanted) for wanted in self._gold] for call in calls]
        matched = fsum(hard_matches(self._similarity))
        self.f1 = 2 * matched / (len(self._similarity) + len(self._gold))
        return self.f1 - before
