"""Turn-level GAE: generalized advantage estimation over the turns of each trajectory, with a learned value."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Annotated, Any

import torch
from torch import Tensor

from perturn.bounds import Bound, OneOf, bounded
from perturn.credit.group_statistics import as_tensors, generalized_advantages, returns_to_go
from perturn.credit.protocol import CreditTraits
from perturn.credit.returns import Numbers, Return
from perturn.needs import Needs, Values
from perturn.types import Status, Trajectory, came_back, failed, unfinished

TokenValues = Sequence[Sequence[Sequence[float] | Tensor | float]]
"""V at the tokens of each turn `[trajectories][turns][tokens]`, or at its first token alone `[trajectories][turns]`; in
units of reward."""

Lengths = Sequence[Sequence[int]]
"""Number of tokens of each turn `[trajectories][turns]`."""


def token_values(group: Sequence[Trajectory], values: TokenValues | None) -> list[Numbers]:
    """Check V at the tokens of each turn, and return it as Python floats `[trajectories][turns][tokens]`.

    Raises:
        ValueError: If `values` is None, or does not have at least one value for each turn.
    """
    if values is None:
        raise ValueError("this credit needs values=, V at the tokens of each turn of each trajectory.")
    found = [
        [torch.as_tensor(turn, dtype=torch.float64).reshape(-1).tolist() for turn in of_one]
        for of_one in values
    ]
    if [len(of_one) for of_one in found] != [len(trajectory.turns) for trajectory in group]:
        raise ValueError("values must hold one entry for each turn of each trajectory of the group.")
    if not all(turn for of_one in found for turn in of_one):
        raise ValueError("values must hold the value of at least one token for each turn.")
    return found


@dataclass(frozen=True)
@bounded
class TurnGAE:
    """Generalized advantage estimate (GAE) over turns, with a learned value before each turn.

        A_t = delta_t + gamma lam A_(t+1),   delta_t = r_t + gamma V_(t+1) - V_t,   V = 0 after the last turn

    If an episode resumes in the next iteration (explorer `window`), V of its last turn replaces the unknown value after
    this turn. V is not trained on such an episode. `truncated: bootstrap` treats an episode cut by a limit in the same
    way.

    Source: VAGEN's `no_concat_gae.py`; Schulman et al. 2016, arXiv:1506.02438, over turns instead of tokens. For
    episodes that resume: extended GAE of "Truncated Proximal Policy Optimization" (T-PPO), 2025, by its abstract.
    Differs: VAGEN's code then whitens the advantages over all tokens of the batch. Here the advantages stay as they
    are, since whitening biases the gradient. The baseline is V at the first token of a turn, which depends on the state
    and not on the action; V at the last token depends on the action. Turns are delimited by their tokens, never by
    rewards.
    """

    gamma: Annotated[float, Bound(least=0, most=1)] = 1.0
    """Discount from one turn to the next, in [0, 1]."""

    lam: Annotated[float, Bound(least=0, most=1)] = 1.0
    """Lambda of GAE, in [0, 1]. At 1 an advantage counts all later rewards; at smaller values V replaces distant
    rewards."""

    truncated: Annotated[str, OneOf(("end", "bootstrap"))] = "end"
    """How to treat an episode cut by a limit, such as the maximum number of turns. end: the return after the limit
    is 0. bootstrap: V of the last turn replaces the missing return."""

    returns: Return = Return()  # noqa: RUF009  frozen
    """Rewards to count, and the penalty of invalid actions; see `Return`."""

    @property
    def needs(self) -> Needs:
        """See `Credit.needs`."""
        return (Values(self.value_targets),)

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        unbiased = self.gamma == 1 and self.lam == 1 and self.truncated == "end"
        return CreditTraits(unbiased=unbiased, takes_unfinished=True, discount=self.gamma)

    def value_targets(self, group: Sequence[Trajectory], tokens: Lengths) -> list[list[list[float]]]:
        """Return the regression target of V at the first token of each turn `[trajectories][turns][1]`.

        The target is the return from the turn on. It is NaN if the return is not known: in an episode that resumes
        later, and in an episode that FAILED before it could resume.
        """
        return [
            [[nan if unknown else each] for each in returns_to_go(rewards, self.gamma)]
            for one, rewards in zip(group, self.returns(group), strict=True)
            for unknown in [self._goes_on(one) or _was_lost(one)]
        ]

    def _goes_on(self, trajectory: Trajectory) -> bool:
        """Return whether the episode continues after its last turn, or would have without the limit."""
        return unfinished(trajectory) or (self.truncated == "bootstrap" and trajectory.truncated)

    def __call__(
        self, group: Sequence[Trajectory], *, values: TokenValues | None = None, **_: Any
    ) -> list[Tensor]:
        """Return the advantage of every turn, one tensor per trajectory, in units of reward [turns]."""
        known = [[turn[0] for turn in of_one] for of_one in token_values(group, values)]
        ends = [own[-1] if own and self._goes_on(one) else 0.0 for one, own in zip(group, known, strict=True)]
        return as_tensors(
            [
                generalized_advantages(rewards, own, self.gamma, self.lam, after)
                for rewards, own, after in zip(self._paid(group), known, ends, strict=True)
            ]
        )

    def _paid(self, group: Sequence[Trajectory]) -> Numbers:
        """Return the reward of each turn. An episode that continues has no outcome here, since V replaces it."""
        return self.returns(
            [replace(one, status=Status.UNFINISHED) if self._goes_on(one) else one for one in group]
        )


def _was_lost(trajectory: Trajectory) -> bool:
    """Return whether a resumed episode FAILED while its earlier turns were restored, so its outcome is unknown."""
    return failed(trajectory) and trajectory.taken_over > 0 and not came_back(trajectory)
