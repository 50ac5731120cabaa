"""SPA: what each turn contributed to the outcome, by a head whose numbers add up to it over an episode."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import fsum, isnan
from typing import Annotated, Any, ClassVar

from torch import Tensor

from perturn.bounds import Bound
from perturn.credit.group import (
    GroupCredit,
    as_tensors,
    by_task,
    means_of_others,
    returns_to_go,
    turn_numbers,
)
from perturn.credit.returns import Numbers
from perturn.types import Trajectory, failed

Contributions = Sequence[Sequence[float] | Tensor]
"""Contribution of each turn, in units of reward `[trajectories][turns]`; those of an episode add up to about its
score."""

ADDED_UP = "what each turn contributed to the score of its episode"


def to_go(contributions: Sequence[float], total: float, bonuses: Sequence[float]) -> list[float]:
    """Return what an episode earns from each turn on, in units of reward [turns].

        total - sum_(k < t) c_k + sum_(k >= t) bonus_k

    Args:
        contributions: c of each turn [turns].
        total: All that is shared out, in units of reward.
        bonuses: Of each turn, beside that [turns].
    """
    before = accumulate(contributions, initial=0.0)
    return [total - past + later for later, past in zip(returns_to_go(bonuses, 1.0), before, strict=False)]


@dataclass(frozen=True)
class SPA(GroupCredit):
    """Rewards that a progress head shares out over the turns, less what the others of the task earn from there on.

        A_it = sum_(k >= t) r_ik - mean_(j != i, T_j > t) sum_(k >= t) r'_jk
        r_ik = c_ik + grounding executed_ik,   at the last turn and with `residual` + S_i - sum_k c_ik

    c is linear in the policy's last hidden state at the last token of the turn's action, and fitted so that its sum
    over an episode is the episode's score S. r' is r; but with `residual` c_j is S_j / T_j there, an even share. Where
    no other trajectory came so far, nothing is taken off.

    Without `grounding` and with `residual` the expected gradient is the true one, whatever c is: A_it is S_i less what
    depends on other episodes and on turns before t. That is why the others' c stay out of it: their heads have learned
    from episode i.

    Source: Wang et al. 2025, "SPA-RL: Reinforcing LLM Agents via Stepwise Progress Attribution", arXiv:2505.20732, by
    its abstract and its released code (`train_our_progress_model.py`, `rl_data_org.py`).
    Differs: the paper has no residual and a bonus of 0.5 for an executed action, `residual: false` with `grounding:
    0.5`, and PPO with a critic on these rewards, in the stead of which others of the task stand here. The head is a
    ridge regression, fitted anew in each iteration and on other episodes alone; the code trains a whole model with a
    linear layer on its logits, once. An episode that FAILED has no bonus. A trajectory alone in its group gets 0.
    Nothing is discounted.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"contributions"})

    grounding: Annotated[float, Bound(least=0)] = 0.0
    """Added for each action that was executed, in units of reward. The paper's 0.5 is left out since it pays for turns:
    ten more of them are worth more than a success that counts 1; `returns.invalid_penalty` tells the same actions apart
    and pays for none."""

    residual: bool = True
    """Whether what an episode earned beyond its contributions is added at its last turn. Without it, as the paper has
    it, what the head does not see is never learned."""

    @property
    def unbiased(self) -> bool:
        """Whether the expected gradient is the true one, whatever the contributions."""
        return self.residual and self.grounding == 0

    def __call__(
        self, group: Sequence[Trajectory], *, contributions: Contributions | None = None, **_: Any
    ) -> list[Tensor]:
        """Return the advantage of every turn, one tensor a trajectory, in units of reward [turns].

        Raises:
            ValueError: If `contributions` is missing, not finite, or has not one entry a turn.
        """
        shares = turn_numbers("contributions", contributions, group, ADDED_UP)
        if any(map(isnan, (share for of_one in shares for share in of_one))):
            raise ValueError("contributions must be finite, got NaN.")
        scores = [fsum(of_one) for of_one in self.returns(group)]
        found: Numbers = [[0.0] * len(of_one) for of_one in shares]
        for members in by_task(group):
            if len(members) > 1:
                own, theirs = zip(
                    *(self._to_go(group[i], shares[i], scores[i]) for i in members), strict=True
                )
                for i, of_one in zip(members, _less_others(own, theirs), strict=True):
                    found[i] = of_one
        return as_tensors(found)

    def _to_go(
        self, trajectory: Trajectory, shares: Sequence[float], score: float
    ) -> tuple[list[float], list[float]]:
        """Return what an episode earns from each turn on, in its own advantages and in those of others [turns]."""
        bonuses = [self.grounding * (turn.valid and not failed(trajectory)) for turn in trajectory.turns]
        own = to_go(shares, score if self.residual else fsum(shares), bonuses)
        if not self.residual or not shares:
            return own, own
        return own, to_go([score / len(shares)] * len(shares), score, bonuses)


def _less_others(own: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Numbers:
    """Return numbers less the mean of others' at the same turn, if any came so far `[trajectories][turns]`."""
    found = [list(of_one) for of_one in own]
    for turn in range(max(map(len, own))):
        reached = [i for i, of_one in enumerate(own) if len(of_one) > turn]
        for i, mean in means_of_others(reached, [theirs[i][turn] for i in reached]).items():
            found[i][turn] -= mean
    return found
