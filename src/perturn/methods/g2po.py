"""G2PO: credit a turn by the value of the state that it reaches, averaged over the group's visits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from perturn.extend import NOT_NEGATIVE, Bound, Trajectory
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
    """Episode advantage, plus the value of the next state, plus the change in value from the state to the next state.

        A_it = A_E + omega (A_next + A_change)
        V(s) = mean over visits of gamma^(T - t) S,   t from 0
        A_next = V(next) - penalty of an invalid turn, normalized over the turns at s
        A_change = V(next) - V(s), normalized over all turns of the task

    A_E is the episode advantage, as in `gigpo`. V after the last turn is S if the task was solved, else 0.

    Source: G2PO, the authors' `core_g2po.py`.
    Differs: the environment decides what a success is. The code requires a score of exactly 10, so with another scale
    of rewards a success counts as a failure. Statistics of A_E run over trajectories; the code's default is `steps`.
    The source's penalty of 0.1 goes with a success worth 10. If a success is worth 1, `invalid_penalty: 0.01` has the
    same effect. States are equal by `state_key`; a turn without a state key is a state of its own. As in the
    code, V after a failure is 0. So an unsolved episode with a partial reward loses that reward by its last turn.
    Scores must not be negative: a failure with a negative score would gain by its last turn. `returns.invalid_penalty`
    can make scores negative; `invalid_penalty` cannot.
    """

    gamma: Annotated[float, Bound(least=0, most=1)] = 0.95
    """Discount of a state's value by the turns left, in [0, 1]."""

    omega: Annotated[float, NOT_NEGATIVE] = 1.0
    """Weight of the states' values, without unit; >= 0."""

    normalize: Normalization = "mean"
    """Normalization. mean: subtract the mean. std: then divide by the standard deviation too."""

    statistics: Unit = "trajectories"
    """Unit of the statistics. trajectories: each trajectory counts once. steps: each turn counts once, so long
    trajectories weigh more, as in the published code."""

    invalid_penalty: Annotated[float, NOT_NEGATIVE] = 0.1
    """Penalty of an invalid action, in units of reward; >= 0. It is subtracted from V(next) and from the episode score
    of the turn."""

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return CreditTraits(needs_group=True, compares_states=True, discount=self.gamma)

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
