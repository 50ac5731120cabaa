"""Quantity `branch-returns`: what the turns of explored episodes were worth, by how their branches end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import fsum, nan
from typing import ClassVar

from torch import Tensor

from perturn.credit.returns import Return
from perturn.data.origins import branches_of
from perturn.needs import BranchReturns, Need, Returns
from perturn.quantities.protocol import Computed, Ground, Quantity, QuantityTraits, Source
from perturn.types import Trajectory, came_back


def branch_values(
    explored: Sequence[Trajectory], branches: Iterable[Trajectory], returns: Returns
) -> list[list[float]]:
    """Return the mean return of the branches from before each turn, counted from there on.

    Args:
        explored: Episodes, in any order.
        branches: Their branches, in any order; a branch that FAILED before it had come back to where it began
            counts for nothing, for it says nothing of that, and another that FAILED with rewards of 0. Leave these out
            before, where they should not count (`perturn.data.group_account.counted`).
        returns: Rewards that count.

    Returns:
        In units of reward `[trajectories][turns]`; NaN where there is no branch.
    """
    values = []
    for one, by_turn in zip(explored, branches_of(explored, filter(came_back, branches)), strict=True):
        values.append([nan] * len(one.turns))
        for turn, found in by_turn.items():
            ends = [fsum(rewards[turn:]) for rewards in returns(found)]
            values[-1][turn] = fsum(ends) / len(ends)
    return values


class MeanBranchReturns(Quantity):
    """Mean return, from each turn on, of the episodes that branch off before the turn.

    Given as `branch_returns`, in units of reward `[trajectories][turns]`, with NaN where none branches off.
    """

    traits: ClassVar[QuantityTraits] = QuantityTraits("branches", reads_branches=True)
    request: ClassVar[type[Need]] = BranchReturns

    def compute(self, request: BranchReturns, episodes: Sequence[Trajectory], source: Source) -> Computed:
        """Compute the means over the branches of the iteration."""
        return Computed(branch_values(episodes, source.branches(), request.returns or Return()))

    def exact(self, request: BranchReturns, ground: Ground) -> list[Tensor]:
        """Return the exact value of the state of each turn, under the policy that plays branches [turns]."""
        return ground.episodes.values(ground.gamma, ground.player)
