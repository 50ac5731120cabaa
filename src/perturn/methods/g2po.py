"""G2PO: a turn by the mean value of the state it led to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from perturn.extend import Bound, Trajectory
from perturn.extend.tensors import (
    CreditTraits,
    GroupCredit,
    Normalization,
    Numbers,
    Unit,
    Visit,
    anchors,
    combined,
    episode_advantages,
    normalized_within,
    penalties,
    solved,
    state_values,
)


@dataclass(frozen=True)
class G2PO(GroupCredit):
    """Episode advantage, plus the value of the state that a turn reaches, plus the change of value that it makes.

        A_it = A_E + omega (A_next + A_change)
        V(s) = mean over visits of gamma^(T - t) S,   t from 0
        A_next = V(next) - penalty of an invalid turn, normalized over the turns at s
        A_change = V(next) - V(s), normalized over all turns of the task

    V after the last turn is S where the task was solved, else 0.

    Source: G2PO, the authors' `core_g2po.py`.
    Differs: the environment says what a success is. The code asks for a score of exactly 10, so with another scale of
    rewards a success counts as a failure. Statistics of A_E run over trajectories; `steps` is the code's default.
    States are equal by `state_key`; a turn without one is a state of its own.
    """

    gamma: Annotated[float, Bound(least=0, most=1)] = 0.95
    """Discount of a state's value by the turns left, in [0, 1]."""

    omega: Annotated[float, Bound(least=0)] = 1.0
    """Weight of the states' values, without unit; >= 0."""

    normalize: Normalization = "mean"
    """mean, or std."""

    statistics: Unit = "trajectories"
    """Unit of the statistics: trajectories; or steps (turns), which weighs long trajectories more, as published."""

    invalid_penalty: Annotated[float, Bound(least=0)] = 0.1
    """Subtracted from V(next) of an invalid turn and from its copy of the score, in units of reward; >= 0."""

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return CreditTraits(needs_group=True, discount=self.gamma)

    def _weigh(self, group: Sequence[Trajectory], rewards: Numbers) -> Numbers:
        scores = [sum(of_one) for of_one in rewards]
        penalty = penalties(group, self.invalid_penalty)
        copies = [[score - off for off in each] for score, each in zip(scores, penalty, strict=True)]
        episode = episode_advantages(scores, copies, normalize=self.normalize, statistics=self.statistics)
        states = anchors(group)
        own = [
            [self.gamma ** (len(each) - t) * score for t in range(len(each))]
            for score, each in zip(scores, rewards, strict=True)
        ]
        value = state_values(states, own)
        after = [
            [*of_one[1:], score if solved(trajectory) else 0.0] if of_one else []
            for of_one, score, trajectory in zip(value, scores, group, strict=True)
        ]
        every: list[Visit] = [(i, t) for i, of_one in enumerate(value) for t in range(len(of_one))]
        step = combined(
            normalized_within(states, combined(after, penalty, -1.0), self.normalize),
            normalized_within([every], combined(after, value, -1.0), self.normalize),
        )
        return combined(episode, step, self.omega)
