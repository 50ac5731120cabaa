"""PAV: the outcome, plus the change in a prover's expected return over each segment of turns."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, isnan
from typing import Annotated, Any

from torch import Tensor

from perturn.extend import NOT_NEGATIVE, BranchReturns, Needs, Trajectory
from perturn.extend.tensors import (
    PLAYED,
    BranchValues,
    CreditTraits,
    GroupCredit,
    as_tensors,
    by_task,
    means_of_others,
    segment_advantages,
    turn_numbers,
)


def first_ends(rewards: Sequence[float], values: Sequence[float]) -> float:
    """Return the rewards of the first segment of a trajectory plus the value after it, in units of reward.

        Q_0 = sum_(k < d) r_k + V_d,   V = 0 after the end

    Args:
        rewards: Reward of each turn [turns].
        values: V before each turn, in units of reward; NaN: not known [turns]. The first entry is ignored.
    """
    cut = next((turn for turn in range(1, len(rewards)) if not isnan(values[turn])), None)
    return fsum(rewards) if cut is None else fsum((*rewards[:cut], values[cut]))


@dataclass(frozen=True)
class PAV(GroupCredit):
    """RLOO's advantage, plus the change in a prover policy's expected return over the segment of the turn.

        A_t = S_i - mean_(j != i) S_j + alpha A^mu_t
        A^mu_t = sum_(k in [c, d)) r_k + V^mu_d - V^mu_c,   c <= t < d

    V^mu_c is the mean return of the prover's branches from turn c; the prover is `explore.policy`. After the end it is
    0. V^mu_0 is replaced by the mean of sum_(k < d) r_k + V^mu_d over the first segments of the task's other
    trajectories. This mean does not depend on trajectory i, so the expected gradient is the same as with V^mu_0, and no
    extra episodes are needed.

    Source: Setlur et al. 2024, "Rewarding Progress: Scaling Automated Process Verifiers for LLM Reasoning",
    arXiv:2410.08146, by its abstract; its effective reward is Q^pi + alpha A^mu.
    Differs: A^mu is a mean over branches; the paper trains a verifier that predicts it. A segment of `explore.every`
    turns has one number. Q^pi is the score of the trajectory minus a baseline. The baseline of the first segment
    comes from the group. The prover is a policy of the run, by default the policy that explored. The paper's value of
    alpha is not known. A trajectory alone in its group gets 0. Returns are not discounted.
    """

    alpha: Annotated[float, NOT_NEGATIVE] = 1.0
    """Weight of A^mu relative to the outcome, without unit; >= 0. At 0 the credit equals `rloo`."""

    @property
    def needs(self) -> Needs:
        """See `Credit.needs`."""
        return (BranchReturns(self.returns),)

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return CreditTraits(needs_group=True, unbiased=self.alpha == 0, takes_prover=True)

    def __call__(
        self, group: Sequence[Trajectory], *, branch_returns: BranchValues | None = None, **_: Any
    ) -> list[Tensor]:
        """Return the advantage of every turn, one tensor per trajectory, in units of reward [turns].

        Raises:
            ValueError: If `branch_returns` is None or infinite, or does not have one entry per turn.
        """
        values, rewards = turn_numbers("branch_returns", branch_returns, group, PLAYED), self.returns(group)
        found = [[0.0] * len(of_one) for of_one in rewards]
        for members in by_task(group):
            scores = [fsum(rewards[i]) for i in members]
            starts = means_of_others(members, [first_ends(rewards[i], values[i]) for i in members])
            others = means_of_others(members, scores)
            for i, score in zip(members, scores, strict=True):
                if i in others:
                    progress = segment_advantages(rewards[i], values[i], starts[i])
                    found[i] = [score - others[i] + self.alpha * each for each in progress]
        return as_tensors(found)
