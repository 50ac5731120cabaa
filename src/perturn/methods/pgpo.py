"""PGPO: compare a turn with other turns in the same state, and add the change in the state's potential."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from perturn.extend import NOT_NEGATIVE, Bound, Trajectory
from perturn.extend.tensors import (
    CreditTraits,
    GroupCredit,
    Normalization,
    Numbers,
    anchors,
    combined,
    normalized_within,
    returns_to_go,
    solved,
    state_values,
)


@dataclass(frozen=True)
class PGPO(GroupCredit):
    """GiGPO's advantage within a state, plus the change in a potential, which weighs more if successes are rare.

        A_it = A_S + beta (1 - p)^alpha A_phi
        Phi(s) = mean of G over the turns at s,   delta = r + gamma Phi(next) - Phi(s),   A_phi = delta normalized at s

    p is the share of the group's trajectories that solved the task. Phi after the last turn is 0.

    Source: PGPO, arXiv:2609.02236.
    Differs: delta has the reward r of the turn, so an action that earns at once is not punished. Without it, delta
    differs only if a turn before the last has a reward. States are equal by `state_key`, not by text. A turn without a
    state key is a state of its own, and gets 0.
    """

    gamma: Annotated[float, Bound(least=0, most=1)] = 1.0
    """Discount from one turn to the next, in [0, 1]."""

    alpha: Annotated[float, NOT_NEGATIVE] = 2.0
    """Exponent of the share of failures 1 - p, without unit; >= 0."""

    beta: Annotated[float, NOT_NEGATIVE] = 1.0
    """Weight of the change in potential, without unit; >= 0."""

    normalize: Normalization = "std"
    """std (as in the paper): subtract the mean and divide by the standard deviation. mean: only subtract the mean."""

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return CreditTraits(needs_group=True, compares_states=True, discount=self.gamma)

    def _weigh(self, group: Sequence[Trajectory], rewards: Numbers) -> Numbers:
        states = anchors(group)
        to_go = [returns_to_go(of_one, self.gamma) for of_one in rewards]
        potential = state_values(states, to_go)
        after = [
            [own + self.gamma * value for own, value in zip(given, [*of_one, 0.0][1:], strict=True)]
            for of_one, given in zip(potential, rewards, strict=True)
        ]
        change = normalized_within(states, combined(after, potential, -1.0), self.normalize)
        failures = 1 - sum(map(solved, group)) / len(group)
        return combined(
            normalized_within(states, to_go, self.normalize), change, self.beta * failures**self.alpha
        )
