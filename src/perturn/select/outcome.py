"""Selection by outcome: an oracle whose score is an upper bound for all selectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from perturn.select.protocol import EpisodeScorer, SelectorInputs, SelectorTraits
from perturn.types import Trajectory, score


@dataclass(frozen=True)
class Outcome:
    """Take the episode with the highest total reward, an upper bound for all selectors.

    The selector looks at the result, which an agent does not know. If each of N episodes succeeds with probability p,
    the best episode succeeds with probability 1 - (1 - p)^N.

    Source: none is needed; with rewards of 0 and 1 it is pass@k.
    Differs: nothing.
    """

    traits: ClassVar[SelectorTraits] = SelectorTraits(among=("episodes",), sees_outcome=True)

    def among_episodes(self, inputs: SelectorInputs) -> EpisodeScorer:
        """Return the function that gives each episode its score."""
        return _scores


def _scores(episodes: Sequence[Trajectory]) -> list[float]:
    return [score(one) for one in episodes]
