"""Quantity `branch-returns`: mean return of the branches of explored episodes, which estimates a state's value."""

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
    """Return the mean return of the branches that start at each turn, from this turn on.

    Args:
        explored: Explored episodes, in any order.
        branches: Branches of these episodes, in any order. A branch that FAILED while its shared turns were replayed is
            ignored. Another branch that FAILED counts with rewards of 0; `perturn.data.group_account.counted` can
            remove such branches before.
        returns: Function from trajectories to the rewards to count.

    Returns:
        Mean returns, in units of reward `[trajectories][turns]`; NaN if no branch starts at the turn.
    """
    values = []
    for one, by_turn in zip(explored, branches_of(explored, filter(came_back, branches)), strict=True):
        values.append([nan] * len(one.turns))
        for turn, found in by_turn.items():
            ends = [fsum(rewards[turn:]) for rewards in returns(found)]
            values[-1][turn] = fsum(ends) / len(ends)
    return values


class MeanBranchReturns(Quantity):
    """Mean return of the branches that start at each turn, from this turn on.

    The credit gets it as argument `branch_returns`, in units of reward `[trajectories][turns]`; NaN if no branch starts
    at the turn.
    """

    traits: ClassVar[QuantityTraits] = QuantityTraits("branches", reads_branches=True)
    request: ClassVar[type[Need]] = BranchReturns

    def compute(self, request: BranchReturns, episodes: Sequence[Trajectory], source: Source) -> Computed:
        """Compute the mean returns over the branches of the iteration."""
        return Computed(branch_values(episodes, source.branches(), request.returns or Return()))

    def exact(self, request: BranchReturns, ground: Ground) -> list[Tensor]:
        """Return the exact value of each turn's state under the policy that plays the branches, in units of reward."""
        return ground.episodes.values(ground.gamma, ground.player)
