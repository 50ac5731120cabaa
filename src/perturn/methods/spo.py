"""SPO: the change in expected return over each segment of turns, estimated from branches at both ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any, ClassVar

from torch import Tensor

from perturn.extend import BranchReturns, Needs, Trajectory
from perturn.extend.tensors import (
    PLAYED,
    BranchValues,
    CreditTraits,
    GroupCredit,
    as_tensors,
    by_task,
    means_of_others,
    segment_advantages,
    turn_numbers,
)


@dataclass(frozen=True)
class SPO(GroupCredit):
    """Change in expected return over the segment of a turn, estimated from branches at both ends of the segment.

        A_t = sum_(k in [c, d)) r_k + V_d - V_c,   c <= t < d

    V_c is the mean return of the branches from turn c. V_0 is the mean score of the other trajectories of the task. V
    after the end is 0. With segments of one turn, the credit equals VinePPO.

    Source: Guo et al. 2025, "Segment Policy Optimization: Effective Segment-Level Credit Assignment in RL for Large
    Language Models", arXiv:2505.23564 (its chain form); Kazemnejad et al. 2024, "VinePPO", arXiv:2410.01679; both by
    their abstracts.
    Differs: a segment has `explore.every` turns; SPO cuts an answer at unlikely tokens. All tokens of a turn have the
    weight of the turn. V_0 comes from the group, so it needs no extra episodes. A trajectory alone in its group gets 0.
    Returns are not discounted.
    """

    traits: ClassVar[CreditTraits] = CreditTraits(needs_group=True, unbiased=True)

    @property
    def needs(self) -> Needs:
        """See `Credit.needs`."""
        return (BranchReturns(self.returns),)

    def __call__(
        self, group: Sequence[Trajectory], *, branch_returns: BranchValues | None = None, **_: Any
    ) -> list[Tensor]:
        """Return the advantage of every turn, one tensor per trajectory, in units of reward [turns].

        Raises:
            ValueError: If `branch_returns` is None or infinite, or does not have one entry per turn.
        """
        values, rewards = turn_numbers("branch_returns", branch_returns, group, PLAYED), self.returns(group)
        found = [[0.0] * len(of_one) for of_one in rewards]
        for members in by_task(group):
            others = means_of_others(members, [fsum(rewards[i]) for i in members])
            for i, start in others.items():
                found[i] = segment_advantages(rewards[i], values[i], start)
        return as_tensors(found)
