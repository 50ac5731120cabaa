"""SPA: learned contributions of turns, which sum to the score of their episode, as rewards of the turns."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import fsum, isfinite
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from perturn.extend import NOT_NEGATIVE, Need, Needs, Returns, Trajectory, failed
from perturn.extend.tensors import (
    CreditTraits,
    GroupCredit,
    Numbers,
    as_tensors,
    by_task,
    means_of_others,
    returns_to_go,
)


@dataclass(frozen=True)
class Contributions(Need):
    """Contribution of each turn to the score of its episode, from heads on hidden states.

    The credit gets them as argument `contributions`: one `Shares` per trajectory, in units of reward.
    """

    name: ClassVar[str] = "contributions"
    returns: Returns | None = None
    """Function from trajectories to the rewards to count; None: the recorded rewards."""


@dataclass(frozen=True)
class Shares:
    """Contributions of the turns of an episode from several heads, in units of reward."""

    heads: Sequence[Sequence[float]]
    """Contributions from each head `[heads][turns]`."""
    head: int = 0
    """Index of the head that was not fitted on this episode; the credit uses it to compare this episode with others."""

    @property
    def own(self) -> Sequence[float]:
        """Contributions from the head that was not fitted on this episode [turns]."""
        return self.heads[self.head]

    def by(self, head: int) -> Sequence[float]:
        """Return the contributions from a head, given by its index; if there is one head, from this head [turns]."""
        return self.heads[head if len(self.heads) > 1 else 0]


TurnShares = Sequence[Shares | Sequence[float] | Tensor]
"""Contributions of the turns of each trajectory, in units of reward: `Shares`, or numbers from one head that was fitted
on none of these trajectories `[trajectories][turns]`."""


def shares_of(contributions: TurnShares | None, group: Sequence[Trajectory]) -> list[Shares]:
    """Check the contributions, and return them as one `Shares` per trajectory.

    Raises:
        ValueError: If `contributions` is None or not finite, or does not have one entry per turn.
    """
    if contributions is None:
        raise ValueError(
            "this credit needs contributions=, what each turn contributed to the score of its episode."
        )
    found = []
    for each in contributions:
        heads, head = (each.heads, each.head) if isinstance(each, Shares) else ((each,), 0)
        numbers = [torch.as_tensor(own, dtype=torch.float64).reshape(-1).tolist() for own in heads]
        found.append(Shares(numbers, head))
    lengths = [len(one.turns) for one in group]
    if len(found) != len(lengths) or any(
        len(own) != length for one, length in zip(found, lengths, strict=True) for own in one.heads
    ):
        raise ValueError("contributions must hold one entry per turn, for each trajectory of the group.")
    if not all(isfinite(share) for one in found for own in one.heads for share in own):
        raise ValueError("contributions must be finite.")
    return found


def to_go(contributions: Sequence[float], total: float, bonuses: Sequence[float]) -> list[float]:
    """Return the sum of contributions and bonuses from each turn on, in units of reward [turns].

        total - sum_(k < t) c_k + sum_(k >= t) bonus_k

    Args:
        contributions: Contribution c of each turn, in units of reward [turns].
        total: Sum of all contributions, in units of reward.
        bonuses: Additional reward of each turn, in units of reward [turns].
    """
    before = accumulate(contributions, initial=0.0)
    return [total - past + later for later, past in zip(returns_to_go(bonuses, 1.0), before, strict=False)]


@dataclass(frozen=True)
class SPA(GroupCredit):
    """Sum of the learned contributions from a turn on, minus the mean of this sum over the task's other episodes.

        A_it = sum_(k >= t) r_ik - mean_(j != i, T_j > t) sum_(k >= t) r_jk
        r_jk = c_jk + grounding executed_jk,   at the last turn and with `residual` + S_j - sum_k c_jk

    c is linear in the policy's last hidden state at the last token of the turn's action. The head is fitted so that
    the sum of c over an episode is its score S. All c in A_i come from one head, which was not fitted on episode i. If
    no other trajectory has a turn t, nothing is subtracted. If `grounding` is 0 and `residual` is True, the expected
    gradient is the true gradient, however accurate c is: A_it is then S_i minus terms that depend only on turns before
    t and on other episodes.

    Source: Wang et al. 2025, "SPA-RL: Reinforcing LLM Agents via Stepwise Progress Attribution", arXiv:2505.20732, by
    its abstract and its released code (`train_our_progress_model.py`, `rl_data_org.py`).
    Differs: the paper gives a bonus of 0.5 for an executed action, and has no residual: `grounding: 0.5` with
    `residual: false`. It uses PPO with a critic on these rewards; here, other episodes of the task replace the critic.
        The head is a
    ridge regression, fitted again in each iteration on other episodes. The code trains a whole model with a linear
    layer on its logits, once. The code's `prm/rl_data_org.py` does not use the learned contributions. It gives every
    turn the episode's reward minus the mean of the task's other rewards, and adds 0.5 to each executed turn. An
    episode that FAILED has no bonus. A trajectory alone in its group gets 0. Returns are not discounted.
    """

    grounding: Annotated[float, NOT_NEGATIVE] = 0.0
    """Bonus for each valid action, in units of reward; >= 0. The default is 0 and not the paper's 0.5, which rewards
    long episodes: ten more turns earn more than a success of reward 1. `returns.invalid_penalty` also separates valid
    from invalid actions, without rewarding turns."""

    residual: bool = True
    """Whether to add the rest of the score, S minus the sum of the contributions, at the last turn. If False, as in the
    paper, the policy is not trained on this rest."""

    @property
    def needs(self) -> Needs:
        """See `Credit.needs`."""
        return (Contributions(self.returns),)

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return CreditTraits(needs_group=True, unbiased=self.residual and self.grounding == 0)

    def __call__(
        self, group: Sequence[Trajectory], *, contributions: TurnShares | None = None, **_: Any
    ) -> list[Tensor]:
        """Return the advantage of every turn, one tensor per trajectory, in units of reward [turns].

        Raises:
            ValueError: If `contributions` is None or not finite, or does not have one entry per turn.
        """
        shares, scores = shares_of(contributions, group), [fsum(of_one) for of_one in self.returns(group)]
        found: Numbers = [[0.0] * len(one.turns) for one in group]
        for members in by_task(group):
            those = [i for i in members if group[i].turns]
            for head in {shares[i].head for i in those} if len(members) > 1 else ():
                numbers = [self._to_go(group[i], shares[i].by(head), scores[i]) for i in those]
                for i, of_one in zip(those, _less_others(numbers), strict=True):
                    if shares[i].head == head:
                        found[i] = of_one
        return as_tensors(found)

    def _to_go(self, trajectory: Trajectory, shares: Sequence[float], score: float) -> list[float]:
        """Return the sum of contributions and bonuses of an episode from each turn on, in units of reward [turns]."""
        bonuses = [self.grounding * (turn.valid and not failed(trajectory)) for turn in trajectory.turns]
        return to_go(shares, score if self.residual else fsum(shares), bonuses)


def _less_others(numbers: Numbers) -> Numbers:
    """Subtract from each number the mean of the other trajectories' numbers at the same turn, if there are any.

    Args:
        numbers: One number for each turn `[trajectories][turns]`.
    """
    found = [list(of_one) for of_one in numbers]
    for turn in range(max(map(len, numbers))):
        reached = [i for i, of_one in enumerate(numbers) if len(of_one) > turn]
        for i, mean in means_of_others(reached, [numbers[i][turn] for i in reached]).items():
            found[i][turn] -= mean
    return found
