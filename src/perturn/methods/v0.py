"""V0: a trajectory's score minus a learned value of its task, optionally averaged with other trajectories' scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Annotated, Any, ClassVar

from torch import Tensor

from perturn.extend import Bound, Needs, Trajectory, Values
from perturn.extend.tensors import (
    CreditTraits,
    GroupCredit,
    Lengths,
    TokenValues,
    as_tensors,
    by_task,
    returns_to_go,
    token_values,
)


@dataclass(frozen=True)
class V0(GroupCredit):
    """Score of the episode minus a learned value of its task, which may be averaged with other episodes' scores.

        A_it = S_i - b_i,   b_i = (prior V_i0 + sum_(j != i) S_j) / (prior + N - 1)

    Without `prior`, b is V_0 alone, so one trajectory per task is enough. V is fitted on other trajectories, so b does
    not depend on trajectory i. The expected gradient is therefore exact, however accurate V is.

    Source: "V_0: A Generalist Value Model for Any Policy at State Zero", and for `prior` "V_0.5: Generalist Value
    Model as a Prior for Sparse RL Rollouts", both by their abstracts. The use of the policy's hidden state instead of a
    value model comes from POISE.
    Differs: V_0 is a ridge head on the hidden state of the policy that acted (`perturn.policy.value_heads`). The
    paper trains a model that reads the policy's results on other prompts. V_0.5 tests whether its prior fits, weighs
    the prior by the result, and draws more samples if it does not fit. Here the prior counts as a fixed number of
    episodes.
    """

    traits: ClassVar[CreditTraits] = CreditTraits(needs_group=True, weighs_alone=True, unbiased=True)

    prior: Annotated[float, Bound(least=0, most=1e9)] | None = None
    """Weight of V_0 in the average with the scores of the task's other episodes, in episodes; >= 0. At 0 the credit
    equals `rloo` if the task has other episodes; an episode alone has b = V_0. None: V_0 alone."""

    @property
    def needs(self) -> Needs:
        """See `Credit.needs`."""
        return (Values(self.value_targets),)

    def value_targets(self, group: Sequence[Trajectory], tokens: Lengths) -> list[list[list[float]]]:
        """Return the regression target of V, the return from each turn on `[trajectories][turns][1]`."""
        return [[[each] for each in returns_to_go(rewards, 1.0)] for rewards in self.returns(group)]

    def __call__(
        self, group: Sequence[Trajectory], *, values: TokenValues | None = None, **_: Any
    ) -> list[Tensor]:
        """Return the advantage of every turn, one tensor per trajectory, in units of reward [turns].

        Raises:
            ValueError: If `values` is None, or does not have at least one value per turn.
        """
        starts = [own[0][0] if own else 0.0 for own in token_values(group, values)]
        scores = [fsum(rewards) for rewards in self.returns(group)]
        found = [0.0] * len(group)
        for members in by_task(group):
            total = fsum(scores[i] for i in members)
            for i in members:
                found[i] = scores[i] - self._baseline(starts[i], total - scores[i], len(members) - 1)
        return as_tensors([[each] * len(one.turns) for each, one in zip(found, group, strict=True)])

    def _baseline(self, start: float, others: float, count: int) -> float:
        """Return the baseline b of an episode, in units of reward.

        Args:
            start: V_0 of the episode.
            others: Sum of the scores of the task's other episodes.
            count: Number of the task's other episodes.
        """
        if self.prior is None or self.prior + count == 0:
            return start
        return (self.prior * start + others) / (self.prior + count)
