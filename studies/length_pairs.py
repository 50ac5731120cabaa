"""Row maker of `studies/webshop-lengths.yaml`: equal groups of pairs, by the length of the rejected episode."""

from dataclasses import dataclass, field
from random import Random
from typing import Annotated, ClassVar

from perturn.extend import (
    COUNT,
    Bound,
    Made,
    RowInputs,
    RowTraits,
    Signals,
    bounded,
    check_signals,
    left_out,
    made,
    pair_with_expert,
)


@dataclass(frozen=True)
@bounded
class LengthGroup:
    """Pair the expert's episodes with the policy's, and keep the pairs of one group by length.

    `expert-pairs` makes the same pairs. They are sorted by the number of turns of the rejected episode, and divided
    into groups of equal size. Equal lengths at the boundary of two groups are divided at random, by the seed of the
    run. The pairs that are left over by the division are the longest ones, and are in no group.

    Source: Shi et al. 2024, "Direct Multi-Turn Preference Optimization for Language Agents", arXiv:2406.14868,
    section 5 and Figure 4.
    Differs: The paper does not say what it does with equal lengths.
    """

    traits: ClassVar[RowTraits] = RowTraits("pairs", expert=True)
    needs: ClassVar[tuple[str, ...]] = ()

    group: Annotated[int, COUNT] = 1
    """Number of the group, from 1 with the shortest rejected episodes."""
    groups: Annotated[int, COUNT] = 3
    """Number of groups."""
    threshold: Annotated[float, Bound(least=0)] = 0.0
    """Difference in total reward that a pair must exceed, in units of reward."""
    signals: Signals = field(default_factory=Signals)
    """Filter of explored episodes by their signals, such as a loop; filtered episodes are left out."""

    def __post_init__(self) -> None:
        check_signals(self.signals)
        if self.group > self.groups:
            raise ValueError(f"group must be <= groups={self.groups}, got {self.group}.")

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the pairs of the group, shortest rejected episodes first."""
        chosen, filtered = left_out(inputs.explored, self.signals)
        pairs, counts = pair_with_expert(inputs.experts, chosen, self.threshold)
        counts.update(filtered)
        Random(inputs.seed).shuffle(pairs)
        pairs.sort(key=lambda pair: len(pair.rejected.turns))
        size = len(pairs) // self.groups
        mine = pairs[size * (self.group - 1) : size * self.group]
        counts["kept"], counts["other_group"] = len(mine), len(pairs) - len(mine)
        return made((mine, counts), f"rows.groups={self.groups}, rows.threshold={self.threshold:g}")
