"""Bi-level GAE: generalized advantages over the turns of a trajectory, then over the tokens of each turn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from perturn.bounds import Bound, check_bounds
from perturn.credit.group_statistics import as_tensors, generalized_advantages, returns_to_go
from perturn.credit.protocol import CreditTraits
from perturn.credit.returns import Numbers, Return
from perturn.credit.turn_gae import Lengths, TokenValues, token_values
from perturn.needs import Needs, Values
from perturn.types import Trajectory


def bi_level_advantages(
    rewards: Sequence[float], values: Numbers, *, gamma: float, lam: float, high_level_gamma: float
) -> Numbers:
    """Return the advantage of each token of a trajectory.

        turns:  A_i = delta_i + h lam A_(i+1),   delta_i = r_i + h V(end of turn i+1) - V(end of turn i)
        tokens: GAE with gamma and lam inside turn i, whose last token has the reward A_i + V(end of turn i)

    Source: RAGEN's `core_algos.py`, bi-level GAE, with h its `high_level_gamma`.
    Differs: each turn ends at its last token. RAGEN finds the end of a turn by its nonzero reward. So it skips a turn
    whose reward is 0, and raises an error if the last reward of an episode is 0.

    Args:
        rewards: Reward of each turn [turns].
        values: V at the tokens of each turn, in units of reward `[turns][tokens]`.
        gamma: Discount from one token to the next.
        lam: Lambda of both levels.
        high_level_gamma: Discount from one turn to the next.

    Returns:
        Advantages, in units of reward `[turns][tokens]`.
    """
    ends = [of_turn[-1] for of_turn in values]
    found = []
    for advantage, end, of_turn in zip(
        generalized_advantages(rewards, ends, high_level_gamma, lam), ends, values, strict=True
    ):
        of_tokens = [*[0.0] * (len(of_turn) - 1), advantage + end]
        found.append(generalized_advantages(of_tokens, of_turn, gamma, lam))
    return found


@dataclass(frozen=True)
class BiLevelGAE:
    """Generalized advantage over turns, then over the tokens of each turn; a turn gets its first token's advantage.

        turns:  A_i = delta_i + h lam A_(i+1),   delta_i = r_i + h V(end of turn i+1) - V(end of turn i)
        tokens: GAE with gamma and lam inside turn i, whose last token has the reward A_i + V(end of turn i)

    h is `high_level_gamma`.

    Source: RAGEN (Wang et al. 2025), arXiv:2504.20073, and its code.
    Differs: one number per turn, the advantage of its first token. Only the value before this token is independent of
    the action. `high_level_gamma` is 0.95 in RAGEN and 1 here, since a smaller value discounts the objective. RAGEN's
    code then whitens the advantages over all tokens of the batch; here they stay as they are. See also
    `bi_level_advantages`.
    """

    gamma: Annotated[float, Bound(least=0, most=1)] = 1.0
    """Discount from one token of a turn to the next, in [0, 1]."""

    lam: Annotated[float, Bound(least=0, most=1)] = 1.0
    """Lambda of GAE, in [0, 1]. At 1 an advantage counts all later rewards; at smaller values V replaces distant
    rewards."""

    high_level_gamma: Annotated[float, Bound(least=0, most=1)] = 1.0
    """Discount from one turn to the next, in [0, 1]."""

    returns: Return = Return()  # noqa: RUF009  frozen
    """Rewards to count, and the penalty of invalid actions; see `Return`."""

    def __post_init__(self) -> None:
        """Reject settings outside their range."""
        check_bounds(self)

    @property
    def needs(self) -> Needs:
        """See `Credit.needs`."""
        return (Values(self.value_targets),)

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        unbiased = self.gamma == self.lam == self.high_level_gamma == 1
        return CreditTraits(unbiased=unbiased, discount=self.high_level_gamma)

    def value_targets(self, group: Sequence[Trajectory], tokens: Lengths) -> list[list[list[float]]]:
        """Return the regression target of V at each token of each turn `[trajectories][turns][tokens]`.

        The target at a token is the return from its turn on, discounted by the number of tokens left in the turn.
        """
        return [
            [
                [each * self.gamma**left for left in reversed(range(length))]
                for each, length in zip(returns_to_go(rewards, self.high_level_gamma), lengths, strict=True)
            ]
            for rewards, lengths in zip(self.returns(group), tokens, strict=True)
        ]

    def __call__(
        self, group: Sequence[Trajectory], *, values: TokenValues | None = None, **_: Any
    ) -> list[Tensor]:
        """Return the advantage of every turn, one tensor per trajectory, in units of reward [turns]."""
        levels = {"gamma": self.gamma, "lam": self.lam, "high_level_gamma": self.high_level_gamma}
        known = token_values(group, values)
        return as_tensors(
            [
                [turn[0] for turn in bi_level_advantages(of_one, value, **levels)]
                for of_one, value in zip(self.returns(group), known, strict=True)
            ]
        )
