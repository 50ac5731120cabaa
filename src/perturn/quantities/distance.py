"""Quantity `distance`: number of actions to a success around each turn, as measured by the environment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from perturn.needs import Distance, Need
from perturn.quantities.protocol import Computed, Ground, Quantity, QuantityTraits, Source
from perturn.remaining import Remaining, failed_as_lost, remaining_of
from perturn.types import Trajectory


class GoalDistance(Quantity):
    """Number of actions to a success, before and after each turn.

    The credit gets it as argument `distance`, one `perturn.remaining.Remaining` per turn `[trajectories][turns]`. A run
    measures it once, and stores it in the turns of the episodes.
    """

    traits: ClassVar[QuantityTraits] = QuantityTraits(
        "each episode played again, beside a solver of the world", of_rows=True
    )
    request: ClassVar[type[Need]] = Distance

    def compute(self, request: Distance, episodes: Sequence[Trajectory], source: Source) -> Computed:
        """Return the distances stored in the turns.

        Raises:
            DataError: If an episode has no measured distance, and did not fail.
        """
        return Computed([remaining_of(failed_as_lost(one)) for one in episodes])

    def exact(self, request: Distance, ground: Ground) -> list[list[Remaining]]:
        """Return the least number of turns to a success around each turn, with the best possible outcomes [turns]."""
        every = ground.episodes
        least = every.process.turns_to_success
        found = []
        for steps, end in zip(every.steps, every.ends, strict=True):
            states = [least.get(step.state) for step in steps]
            last = 0 if end.success else None if end.to is None else least.get(end.to)
            path = [*states, last]
            found.append([Remaining(*both) for both in pairwise(path)] if steps else [])
        return found
