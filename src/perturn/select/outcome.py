"""Selection by outcome: the bound on what any selector could reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from perturn.select.protocol import EpisodeScorer, SelectorInputs, SelectorTraits
from perturn.types import Trajectory, score


@dataclass(frozen=True)
class Outcome:
    """Take the episode with the highest total reward, which bounds what any selector could reach.

    It looks at the result, as no agent could. Of N episodes that each succeed with chance p, the best succeeds with
    chance 1 - (1 - p)^N.

    Source: none is needed; pass@k by another name.
    Differs: nothing.
    """

    traits: ClassVar[SelectorTraits] = SelectorTraits(among=("episodes",), sees_outcome=True)

    def among_episodes(self, inputs: SelectorInputs) -> EpisodeScorer:
        """Return the function that gives each episode its score."""
        return _scores


def _scores(episodes: Sequence[Trajectory]) -> list[float]:
    return [score(one) for one in episodes]
