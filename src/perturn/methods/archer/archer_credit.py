"""ArCHer: advantages of turns by critics kept from iteration to iteration, Q after the action less V before it."""

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
    """Q and V of each turn by critics that keep learning from iteration to iteration.

    Given as `critics`, in units of reward, a `perturn.methods.archer.archer_credit.Critique` a trajectory.
    """

    name: ClassVar[str] = "critics"
    gamma: float
    """Discount from one turn to the next."""
    tau: float
    """Step of the slow copies towards their critics in a round, in (0, 1]."""
    rounds: int
    """Regressions of each head in an iteration."""
    penalty: float
    """Pull of each head towards its weights before the iteration, relative to the variance of all features
    together."""
    returns: Returns | None = None
    """Rewards that count; None: as recorded."""


@dataclass(frozen=True)
class Critique:
    """Q and V of the turns of an episode by each of several critics, in units of reward."""

    q: Sequence[Sequence[float]]
    """Q of each turn: what is expected from there on, its action known and not yet the reply `[critics][turns]`."""
    v: Sequence[Sequence[float]]
    """V of each turn: what is expected before its action is known `[critics][turns]`."""


def critiques_of(
    critics: Sequence[Critique] | None, group: Sequence[Trajectory]
) -> list[tuple[Tensor, Tensor]]:
    """Return Q and V of each trajectory, each in units of reward [critics, turns].

    Raises:
        ValueError: If they are missing, not finite, or have not one entry per turn.
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
    """Value of a turn's action minus the value of its state, by two critics that keep learning between iterations.

        A_t = min_k Q_k(s_t, a_t) - min_k V_k(s_t)

    Each critic is learned from one turn to the next, with copies Q' and V' that follow it slowly:

        Q(s_t, a_t) <- r_t + gamma V'(s_(t+1)),   V(s_t) <- Q'(s_t, a_t),   copy <- (1 - tau) copy + tau own,

    V' = 0 after the last turn. Critics learn in every iteration, starting from the critics of the previous iteration.

    Source: Zhou et al. 2024, "ArCHer: Training Language Model Agents via Hierarchical Multi-Turn RL", arXiv:2402.19446,
    and its code.
    Differs: in the paper a critic is a small language model with heads, trained by Adam on turns from a buffer of
    many iterations. Here a critic is two linear heads on the hidden states of the policy that the loop began with.
    Each head is fitted by ridge regression to the episodes of the iteration alone, `rounds` times (module `critics`).
    V learns from the recorded action, which the policy has just sampled, instead of another sampled action. The two
    critics differ in the episodes that they learn from; in the paper they differ in their initial weights. The policy
    learns by the loss that the recipe names.
    """

    gamma: Annotated[float, Bound(least=0, most=1)] = 0.9
    """Discount from one turn to the next, in [0, 1]."""

    tau: Annotated[float, Bound(above=0, most=1)] = 0.1
    """Step of the copies towards their critics in a round, in (0, 1]."""

    rounds: Annotated[int, Bound(least=1, most=100_000)] = 1000
    """Regressions of each head in an iteration, >= 1; the copies move after each. A reward reaches the value of the
    turn before it after about 2 / tau rounds. Rounds take little time."""

    penalty: Annotated[float, Bound(least=1e-12)] = 1e-4
    """Pull of each head towards its weights at the start of the iteration, relative to the variance of all features
    together; >= 1e-12, since rounding would decide the weights of dependent features otherwise. The first iteration
    starts from weights of 0."""

    returns: Return = Return()  # noqa: RUF009  frozen
    """Rewards that count."""

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
            ValueError: If `critics` is missing, not finite, or has not one entry per turn.
        """
        known = critiques_of(critics, group)
        return as_tensors([(q.amin(0) - v.amin(0)).tolist() for q, v in known])
