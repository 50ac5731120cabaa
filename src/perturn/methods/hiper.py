"""HiPER: generalized advantages on two levels, over the turns within a segment and over segments."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from perturn.extend import Bound, Needs, OneOf, Trajectory, Turn, Values, check_bounds
from perturn.extend.tensors import (
    CreditTraits,
    Lengths,
    Return,
    TokenValues,
    as_tensors,
    generalized_advantages,
    returns_to_go,
    token_values,
)

SWITCHES = ("reply", "action")
"""Text that decides where a segment begins: the observation before a turn, or the action of the turn."""


def hierarchical_advantages(
    rewards: Sequence[float],
    values: Sequence[float],
    begins: Sequence[bool],
    *,
    gamma: float,
    lam: float,
    high_level_lam: float,
) -> list[float]:
    """Return the advantage of each turn of a trajectory, on the level of segments or of turns.

        first turn c of a segment [c, d):
            A_c = sum_(k in [c, d)) gamma^(k - c) r_k + gamma^(d - c) (V_d + high_level_lam A_d) - V_c
        other turns of the segment, with A = 0 after its last turn:
            A_t = delta_t + gamma lam A_(t + 1),   delta_t = r_t + gamma V_(t + 1) - V_t

    A_c is the generalized advantage over segments. A_t is the generalized advantage over the turns of one segment, as
    if the episode ended with the segment and a final value of V_d.

    Args:
        rewards: Reward of each turn [turns].
        values: V before each turn, in units of reward [turns]. V after the last turn is 0.
        begins: Whether a segment begins at each turn [turns]. The first turn always begins a segment.
        gamma: Discount from one turn to the next.
        lam: Lambda from one turn of a segment to the next.
        high_level_lam: Lambda from one segment to the next.

    Returns:
        Advantages, in units of reward [turns].
    """
    found = [0.0] * len(rewards)
    starts = [turn for turn in range(len(rewards)) if turn == 0 or begins[turn]]
    ends = [*starts[1:], len(rewards)][: len(starts)]
    high = 0.0
    for start, end in reversed(list(zip(starts, ends, strict=True))):
        after = values[end] if end < len(rewards) else 0.0
        # Adding the discounted value after the segment to the last reward gives the right discount at each turn.
        earned = [*rewards[start : end - 1], rewards[end - 1] + gamma * after]
        over = gamma ** (end - start)
        high = returns_to_go(earned, gamma)[0] - values[start] + over * high_level_lam * high
        found[start:end] = generalized_advantages(earned, values[start:end], gamma, lam)
        found[start] = high
    return found


@dataclass(frozen=True)
class HiPER:
    """Advantage on two levels: over segments for a segment's first turn, over its turns for the other turns.

        A_c = sum_(k in [c, d)) gamma^(k - c) r_k + gamma^(d - c) (V_d + high_level_lam A_d) - V_c
        A_t = delta_t + gamma lam A_(t + 1),   delta_t = r_t + gamma V_(t + 1) - V_t

    c is the first turn of a segment [c, d), and t any other turn of the segment. The advantage after the last turn of
    the segment is 0. See `hierarchical_advantages`.

    Source: HiPER, "Hierarchical Reinforcement Learning with Explicit Credit Assignment for Large Language Model
    Agents", by its abstract and its code (hierarchical advantage estimation).
    Differs: in the paper, a turn has three parts with one advantage each: a decision to keep the subgoal, the subgoal,
    and the action. Here a turn has one number, and the first turn of a segment has the advantage of the whole segment.
    The paper has a value of the state and a value of state and subgoal. Here there is one value, V before the turn. It
    depends on the subgoal if the history contains the subgoal. Penalties for keeping a subgoal are left out. By default
    the newest observation decides where a segment begins (`by: reply`). With `by: action`, the action decides. The
    previous turn then gets the return of this action only if the segment continues, which biases the gradient
    even if V is exact.
    """

    switch: str = ""
    """Regular expression (Python) that is searched in a text of each turn, such as `^You arrive`. A segment begins
    where it is found. Empty: a segment begins at every turn."""

    by: Annotated[str, OneOf(SWITCHES)] = "reply"
    """Text in which `switch` is searched. reply: the newest observation before the turn. action: the turn's action,
    without its native tool calls."""

    gamma: Annotated[float, Bound(least=0, most=1)] = 1.0
    """Discount from one turn to the next, in [0, 1]."""

    lam: Annotated[float, Bound(least=0, most=1)] = 1.0
    """Lambda of GAE within a segment, in [0, 1]. At 1 an advantage counts all rewards to the end of the segment; at
    smaller values V replaces distant rewards."""

    high_level_lam: Annotated[float, Bound(least=0, most=1)] = 1.0
    """Lambda of GAE from segment to segment, in [0, 1]. At 1 an advantage counts all rewards to the end of the episode;
    at smaller values V replaces distant rewards."""

    returns: Return = Return()  # noqa: RUF009  frozen
    """Rewards to count, and the penalty of invalid actions; see `Return`."""

    def __post_init__(self) -> None:
        """Reject settings outside their range, and a `switch` that is no regular expression."""
        check_bounds(self)
        try:
            re.compile(self.switch)
        except re.error as error:
            raise ValueError(
                f"switch must be a regular expression, got {self.switch!r:.80}: {error}."
            ) from None

    @property
    def needs(self) -> Needs:
        """See `Credit.needs`."""
        return (Values(self.value_targets),)

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        unbiased = self.switch == "" and self.gamma == self.high_level_lam == 1
        return CreditTraits(unbiased=unbiased, discount=self.gamma)

    def value_targets(self, group: Sequence[Trajectory], tokens: Lengths) -> list[list[list[float]]]:
        """Return the regression target of V, the return from each turn on `[trajectories][turns][1]`."""
        return [[[each] for each in returns_to_go(rewards, self.gamma)] for rewards in self.returns(group)]

    def __call__(
        self, group: Sequence[Trajectory], *, values: TokenValues | None = None, **_: Any
    ) -> list[Tensor]:
        """Return the advantage of every turn, one tensor per trajectory, in units of reward [turns]."""
        levels = {"gamma": self.gamma, "lam": self.lam, "high_level_lam": self.high_level_lam}
        known = token_values(group, values)
        return as_tensors(
            [
                hierarchical_advantages(
                    rewards,
                    [turn[0] for turn in value],
                    [self._begins(turn) for turn in one.turns],
                    **levels,
                )
                for one, rewards, value in zip(group, self.returns(group), known, strict=True)
            ]
        )

    def _begins(self, turn: Turn) -> bool:
        """Return whether a segment begins at a turn, by `switch` and `by`."""
        if not self.switch:
            return True
        text = turn.observation_text if self.by == "reply" else turn.action.text
        return re.search(self.switch, text) is not None
