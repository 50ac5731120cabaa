"""IGPO: the reward of a turn is its change in the gold answer's likelihood; the last turn gets the outcome."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from perturn.extend import Answer, Bound, Needs, OneOf, Trajectory
from perturn.extend.tensors import (
    GAINS,
    Answers,
    CreditTraits,
    Deviation,
    GroupCredit,
    Normalization,
    Numbers,
    Visit,
    answer_numbers,
    normalized_within,
    returns_to_go,
    turn_gains,
    weigh_tasks,
)

POOLS = ("joint", "separate")
"""Normalization of the gains and outcomes of a group. joint: all together. separate: gains and outcomes separately."""


@dataclass(frozen=True)
class IGPO(GroupCredit):
    """Increase in the gold answer's likelihood at each turn, and the outcome at the last turn.

        r_t = IG_t for t < T - 1,   r_(T-1) = S
        z_t = (r_t - mean(R)) / (std(R) + 1e-6),   A_t = sum_(k >= t) gamma^(k - t) z_k

    IG comes from `information_gains`, and R holds the rewards of all turns of the group.

    Source: Wang et al. 2025, "Information Gain-based Policy Optimization", arXiv:2510.14967, and its released code
    (`core_algos.py`). The code's modes joint and separate are `pools`, and its `prob_diff` and `log_prob_diff` are
    `gain`. The first release subtracted the mean return at each token index, which has no counterpart over turns.
    Differs: a turn whose gain is exactly 0 counts as a turn; the code skips it. A reward of the environment before the
    end is added to the gain of its turn; the paper has no such rewards. The only penalty of a malformed answer is
    `returns.invalid_penalty`. A trajectory alone in its group gets 0; the code compares its turns with each other. A
    FAILED trajectory counts with gains of 0.
    """

    gamma: Annotated[float, Bound(least=0, most=1)] = 1.0
    """Discount from one turn to the next, in [0, 1]."""

    gain: Annotated[str, OneOf(GAINS)] = "probability"
    """Quantity whose change is the gain: probability (the geometric mean over the answer's tokens), or logprob (its
    logarithm)."""

    normalize: Normalization = "std"
    """Normalization of the rewards. mean: subtract the mean. std: then divide by the standard deviation too."""

    pools: Annotated[str, OneOf(POOLS)] = "joint"
    """Sets of rewards that are normalized. joint: gains and outcomes of a group together. separate: gains, and
    outcomes."""

    std: Deviation = "population"
    """Standard deviation: population (over n), or sample (over n - 1)."""

    last_gain: bool = False
    """Whether the last turn has a gain in addition to the outcome. The answer is then scored right after the last
    action, before the environment's reply."""

    @property
    def needs(self) -> Needs:
        """See `Credit.needs`."""
        return (Answer(self.last_gain),)

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return CreditTraits(needs_group=True, discount=self.gamma)

    def __call__(
        self, group: Sequence[Trajectory], *, answer: Answers | None = None, **_: Any
    ) -> list[Tensor]:
        """Return the advantage of every turn, one tensor per trajectory, without unit [turns]."""
        known = answer_numbers(group, answer)

        def rewards(group: Sequence[Trajectory]) -> Numbers:
            gains = [
                turn_gains(one, logprobs, self.gain, self.last_gain)
                for one, logprobs in zip(group, known, strict=True)
            ]
            return [
                [reward + gain for reward, gain in zip(*both, strict=True)]
                for both in zip(self.returns(group), gains, strict=True)
            ]

        return weigh_tasks(group, rewards, self._weigh)

    def _weigh(self, group: Sequence[Trajectory], rewards: Numbers) -> Numbers:
        before: list[Visit] = [(i, t) for i, of_one in enumerate(rewards) for t in range(len(of_one) - 1)]
        last: list[Visit] = [(i, len(of_one) - 1) for i, of_one in enumerate(rewards) if of_one]
        pools = [before + last] if self.pools == "joint" else [before, last]
        normalized = normalized_within(pools, rewards, self.normalize, self.std)
        return [returns_to_go(of_one, self.gamma) for of_one in normalized]
