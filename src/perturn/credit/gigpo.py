"""GiGPO: compare each trajectory with its group, and each turn with other turns in the same state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from perturn.bounds import NOT_NEGATIVE, Bound
from perturn.credit.group_statistics import (
    GroupCredit,
    Normalization,
    Unit,
    anchors,
    combined,
    episode_advantages,
    normalized_within,
    penalties,
    returns_to_go,
)
from perturn.credit.protocol import CreditTraits
from perturn.credit.returns import Numbers
from perturn.types import Trajectory


@dataclass(frozen=True)
class GiGPO(GroupCredit):
    """Episode advantage in the group, plus the turn's advantage among all turns that start in the same state.

        A_it = A_E + omega A_S,   A_E = S_i - mean(S),   A_S = G_it - mean of G over the turns at state s_it

    With `normalize` std, A_E and A_S are each divided by their sample standard deviation + 1e-6. G_it = sum_k
    gamma^(k - t) r_ik.

    Source: Feng et al. 2025, "Group-in-Group Policy Optimization for LLM Agent Training", arXiv:2505.10978, and its
    code.
    Differs: statistics over episodes run over trajectories; the code runs them over turns, as `steps` does. States are
    equal by `state_key`, not by text. Similar keys form connected components. The code compares a key with the first
    key of a cluster, so its result depends on the order of the keys. The similarity counts every letter; the code
    ignores letters that are frequent in a key of 200 letters or more. All visits of a trajectory count, as in the code.
    A turn alone in its state and a trajectory alone in its group get 0. The credit is biased, since a baseline contains
    the turn itself and later turns of its trajectory.
    """

    gamma: Annotated[float, Bound(least=0, most=1)] = 0.95
    """Discount of the return G from one turn to the next, in [0, 1]."""

    omega: Annotated[float, NOT_NEGATIVE] = 1.0
    """Weight of the advantage within a state, A_S, without unit; >= 0."""

    normalize: Normalization = "mean"
    """mean: subtract the mean. std: then divide by the standard deviation too, as in the authors' scripts."""

    statistics: Unit = "trajectories"
    """Unit of the statistics. trajectories: each trajectory counts once. steps: each turn counts once, so long
    trajectories weigh more, as in the published code."""

    similarity: Annotated[float, Bound(least=0, most=1)] | None = None
    """Minimum similarity of two state keys that count as one state, in [0, 1]; None: keys must be equal. The
    texts of the keys are compared. The keys of Perturn's environments are hashes, for which it has no effect."""

    invalid_penalty: Annotated[float, NOT_NEGATIVE] = 0.0
    """Penalty of an invalid action, in units of reward; >= 0. It is subtracted from the turn's discounted return and
    from the turn's episode score."""

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return CreditTraits(needs_group=True, compares_states=True, discount=self.gamma)

    def _weigh(self, group: Sequence[Trajectory], rewards: Numbers) -> Numbers:
        penalty = penalties(group, self.invalid_penalty)
        scores = [sum(of_one) for of_one in rewards]
        copies = [[score - off for off in of_one] for score, of_one in zip(scores, penalty, strict=True)]
        episode = episode_advantages(scores, copies, normalize=self.normalize, statistics=self.statistics)
        to_go = [
            [value - off for value, off in zip(returns_to_go(of_one, self.gamma), offs, strict=True)]
            for of_one, offs in zip(rewards, penalty, strict=True)
        ]
        step = normalized_within(anchors(group, similarity=self.similarity), to_go, self.normalize)
        return combined(episode, step, self.omega)
