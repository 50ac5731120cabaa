"""ArCHer: Q after the action minus V before it, from critics that are trained across iterations."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from perturn.extend import Bound, Need, Needs, Returns, Trajectory, check_bounds
from perturn.extend.tensors import CreditTraits, Return, as_tensors


@dataclass(frozen=True)
class Critics(Need):
    """Q and V of each turn, from critics that are trained across iterations.

    The credit gets them as argument `critics`: one `Critique` per trajectory, in units of reward.
    """

    name: ClassVar[str] = "critics"
    gamma: float
    """Discount from one turn to the next."""
    tau: float
    """Step size of the target critics towards the critics in each round, in (0, 1]."""
    rounds: int
    """Number of regressions of each head per iteration."""
    penalty: float
    """Ridge penalty towards the weights at the start of the iteration, relative to the total variance of the
    features."""
    returns: Returns | None = None
    """Function from trajectories to the rewards to count; None: the recorded rewards."""


@dataclass(frozen=True)
class Critique:
    """Q and V of the turns of an episode from several critics, in units of reward."""

    q: Sequence[Sequence[float]]
    """Q of each turn: expected return given the action, before the environment's reply `[critics][turns]`."""
    v: Sequence[Sequence[float]]
    """V of each turn: expected return before the action `[critics][turns]`."""


def critiques_of(
    critics: Sequence[Critique] | None, group: Sequence[Trajectory]
) -> list[tuple[Tensor, Tensor]]:
    """Check Q and V of each trajectory, and return them as tensors, in units of reward, each [critics, turns].

    Raises:
        ValueError: If `critics` is None or not finite, or does not have one entry per turn.
    """
    if critics is None:
        raise ValueError("this credit needs critics=, Q and V of each turn of each trajectory.")
    lengths = [len(one.turns) for one in group]
    sides = [(one.q, one.v) for one in critics]
    if len(sides) != len(lengths) or any(
        len(side) == 0 or any(len(own) != length for own in side)
        for both, length in zip(sides, lengths, strict=True)
        for side in both
    ):
        raise ValueError("critics must hold Q and V of each turn, for each trajectory of the group.")
    if not all(isfinite(value) for both in sides for side in both for own in side for value in own):
        raise ValueError("critics must be finite.")
    return [
        (torch.tensor(list(q), dtype=torch.float64), torch.tensor(list(v), dtype=torch.float64))
        for q, v in sides
    ]


@dataclass(frozen=True)
class ArCHer:
    """Value of a turn's action minus the value of its state, from two critics that are trained across iterations.

        A_t = min_k Q_k(s_t, a_t) - min_k V_k(s_t)

    Each critic is trained by temporal differences, with target critics Q' and V' that follow Q and V slowly:

        Q(s_t, a_t) <- r_t + gamma V'(s_(t+1)),   V(s_t) <- Q'(s_t, a_t),   Q' <- (1 - tau) Q' + tau Q, V' likewise

    V' = 0 after the last turn. Every iteration trains the critics further, starting from the previous iteration's.

    Source: Zhou et al. 2024, "ArCHer: Training Language Model Agents via Hierarchical Multi-Turn RL", arXiv:2402.19446,
    and its code.
    Differs: in the paper, a critic is a small language model with heads, trained with Adam on a buffer of turns from
    many iterations. Here, a critic has two linear heads on the hidden states of the policy that the loop started with.
    Each head is fitted by ridge regression to the episodes of the iteration alone, `rounds` times (module `critics`).
    V is trained on the recorded action, which the policy has just sampled, instead of a new sampled action. The two
    critics differ in their training episodes; in the paper they differ in their initial weights. The loss of the recipe
    trains the policy.
    """

    gamma: Annotated[float, Bound(least=0, most=1)] = 0.9
    """Discount from one turn to the next, in [0, 1]."""

    tau: Annotated[float, Bound(above=0, most=1)] = 0.1
    """Step size of the target critics towards the critics in each round, in (0, 1]."""

    rounds: Annotated[int, Bound(least=1, most=100_000)] = 1000
    """Number of regressions of each head per iteration; >= 1. The target critics move after each regression. A reward
    reaches the value of the previous turn after about 2 / tau rounds. A round takes little time."""

    penalty: Annotated[float, Bound(least=1e-12)] = 1e-4
    """Ridge penalty towards the weights at the start of the iteration, relative to the total variance of the features.
    It is >= 1e-12, so that rounding does not decide the weights of dependent features. The first iteration starts from
    weights of 0."""

    returns: Return = Return()  # noqa: RUF009  frozen
    """Rewards to count, and the penalty of invalid actions; see `Return`."""

    def __post_init__(self) -> None:
        """Reject settings outside their range."""
        check_bounds(self)

    @property
    def needs(self) -> Needs:
        """See `Credit.needs`."""
        return (Critics(self.gamma, self.tau, self.rounds, self.penalty, self.returns),)

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return CreditTraits(discount=self.gamma)

    def __call__(
        self, group: Sequence[Trajectory], *, critics: Sequence[Critique] | None = None, **_: Any
    ) -> list[Tensor]:
        """Return the advantage of every turn, one tensor per trajectory, in units of reward [turns].

        Raises:
            ValueError: If `critics` is None or not finite, or does not have one entry per turn.
        """
        known = critiques_of(critics, group)
        return as_tensors([(q.amin(0) - v.amin(0)).tolist() for q, v in known])
