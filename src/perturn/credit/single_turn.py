"""Credits that need no group, since each number depends on its turn alone: uniform, confidence, discount."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from perturn.bounds import POSITIVE, SHARE, OneOf, bounded, check_bounds
from perturn.credit.protocol import CreditTraits, TurnCredit
from perturn.needs import Needs, Reference, reads
from perturn.types import Trajectory


def weigh_group(
    credit: TurnCredit, group: Sequence[Trajectory], reference: Sequence[Sequence[Tensor]] | None = None
) -> list[Tensor]:
    """Weigh each trajectory of a group by itself, with a credit that needs no group.

    Args:
        credit: What weighs.
        group: Trajectories.
        reference: log pi_ref of each turn's tokens, in nats `[trajectories][turns]`, each [tokens]; None unless the
            credit needs it.

    Returns:
        Weights, without unit, one tensor per trajectory [turns].

    Raises:
        ValueError: If the reference is needed and missing, or has not one entry per turn.
    """
    turns = [len(one.turns) for one in group]
    confidence: list[Tensor | None] = [None] * len(group)
    if reads(credit.needs, Reference):
        if reference is None:
            raise ValueError(
                f"{type(credit).__name__} needs reference=, the log-probabilities of each turn's tokens."
            )
        if [len(one) for one in reference] != turns:
            raise ValueError("reference must hold one entry for each turn of each trajectory of the group.")
        confidence = [_confidence(one) for one in reference]
    return [
        credit.weigh(torch.arange(count, dtype=torch.float32), torch.full((count,), float(count)), known)
        for count, known in zip(turns, confidence, strict=True)
    ]


def _confidence(turns: Sequence[Tensor]) -> Tensor:
    """Return the geometric mean of pi_ref over each turn [turns]; added up as `TurnLogprobs` does, to the last bit."""
    counts = torch.tensor([len(turn) for turn in turns])
    turn_index = torch.arange(len(turns)).repeat_interleave(counts)
    tokens = torch.cat(list(turns))
    sums = torch.zeros(len(turns), dtype=tokens.dtype).index_add(0, turn_index, tokens)
    return (sums / counts).exp()


@dataclass(frozen=True)
class Uniform:
    """Weight 1 for every turn, as in a loss on whole episodes.

    Source: none is needed. Turn-level credits are compared with this baseline.
    Differs: nothing.
    """

    needs: ClassVar[Needs] = ()
    traits: ClassVar[CreditTraits] = CreditTraits()

    def __call__(self, group: Sequence[Trajectory], **_: Any) -> list[Tensor]:
        """Return 1 for every turn, one tensor per trajectory, without unit [turns]."""
        return weigh_group(self, group)

    def weigh(self, position: Tensor, turns: Tensor, confidence: Tensor | None = None) -> Tensor:
        """Return 1 for every turn, without unit [turns]."""
        return torch.ones_like(position)


def confidence_weights(confidence: Tensor, *, pivot: float, low: float, high: float) -> Tensor:
    """Weigh turns of which the reference is confident lower than the others.

        omega_i = low  if p_i > pivot else high,   p_i = exp(mean_j log pi_ref(y_ij))

    Source: tlm-DRE ("turn-level multiscale density ratio estimation"), Eqs. 9-10.
    Differs: nothing. Read from the reference, never from the policy; carries no gradient.

    Args:
        confidence: p, in (0, 1] [turns].
        pivot: Confidence up to which a turn takes the high weight, in [0, 1].
        low: Weight of a confident turn, without unit.
        high: Weight of any other turn, without unit.

    Returns:
        Weights, without unit [turns].
    """
    return torch.full_like(confidence, low).masked_fill(confidence <= pivot, high)


@dataclass(frozen=True)
class Confidence:
    """Low weight for turns that the reference is confident of, high weight for all other turns.

        omega_i = low if p_i > pivot, else high,   p_i = exp((1 / n_i) sum_j log pi_ref(y_ij))

    n_i counts the tokens of turn i. See `confidence_weights`.

    Source: tlm-DRE ("turn-level multiscale density ratio estimation"), Eqs. 9-10.
    Differs: nothing.
    """

    needs: ClassVar[Needs] = ("reference",)
    traits: ClassVar[CreditTraits] = CreditTraits()

    pivot: Annotated[float, SHARE] = 0.9
    """Confidence above which a turn gets the low weight, in [0, 1]."""

    low: Annotated[float, POSITIVE] = 0.2
    """Weight of a turn the reference is confident of, without unit; > 0."""

    high: Annotated[float, POSITIVE] = 1.0
    """Weight of any other turn, without unit; >= low."""

    def __post_init__(self) -> None:
        """Reject settings outside their range."""
        check_bounds(self)
        if self.high < self.low:
            raise ValueError(f"high must be >= low, got high {self.high} and low {self.low}.")

    def __call__(
        self, group: Sequence[Trajectory], *, reference: Sequence[Sequence[Tensor]] | None = None, **_: Any
    ) -> list[Tensor]:
        """Return the weight of every turn, one tensor per trajectory, without unit [turns].

        See `weigh_group`.
        """
        return weigh_group(self, group, reference)

    def weigh(self, position: Tensor, turns: Tensor, confidence: Tensor | None) -> Tensor:
        """Return the omega of every turn, without unit [turns]."""
        assert confidence is not None
        return confidence_weights(confidence, pivot=self.pivot, low=self.low, high=self.high)


def derived_discount(position: Tensor, turns: Tensor, *, gamma: float) -> Tensor:
    """Return the discount of turn t of T, as it follows from the occupancy measure.

        phi(t, T) = gamma^t (1 - gamma^(T - t)) / (1 - gamma^T)

    Source: DMPO (Shi et al. 2024), Eqs. 14-15 and Corollary 4.0.2.
    Differs: the printed Eq. 16 lost the factor gamma^t; see printed_discount. Exact limits: gamma = 0 leaves
    the first turn alone, gamma = 1 gives (T - t) / T.

    Args:
        position: t, from 0 [turns], floating point; the result has its dtype.
        turns: T of the trajectory each turn belongs to [turns], floating point.
        gamma: Discount, in [0, 1].

    Returns:
        Discount, without unit, in [0, 1] [turns].
    """
    if gamma == 0:
        return (position == 0).to(position.dtype)
    return torch.exp(position * math.log(gamma)) * printed_discount(position, turns, gamma=gamma)


def printed_discount(position: Tensor, turns: Tensor, *, gamma: float) -> Tensor:
    """Return the discount of turn t of T, as the paper prints it.

        phi(t, T) = (1 - gamma^(T - t)) / (1 - gamma^T)

    Source: DMPO (Shi et al. 2024), Eq. 16.
    Differs: nothing. Contradicts Corollary 4.0.2 of the paper: gamma = 0 gives 1 for every turn. gamma = 1 is
    the exact limit (T - t) / T.

    Args and Returns: as of derived_discount.
    """
    if gamma == 0:
        return torch.ones_like(position)
    if gamma == 1:
        return (turns - position) / turns
    # 1 - gamma^k as -expm1(k log gamma): keeps its digits when gamma is near 1.
    log_gamma = math.log(gamma)
    return torch.expm1((turns - position) * log_gamma) / torch.expm1(turns * log_gamma)


DISCOUNTS: dict[str, Callable[..., Tensor]] = {"derived": derived_discount, "printed": printed_discount}
"""Discount by name."""


@dataclass(frozen=True)
@bounded
class Discount:
    """DMPO's weight, which falls from the first turn of an episode to the last.

        phi(t, T) = gamma^t (1 - gamma^(T - t)) / (1 - gamma^T)          derived
        phi(t, T) = (1 - gamma^(T - t)) / (1 - gamma^T)                  printed

    T counts the turns of the episode. See `derived_discount` and `printed_discount`.

    Source: DMPO (Shi et al. 2024), Eqs. 14-15; as printed, Eq. 16.
    Differs: see `derived_discount`.
    """

    needs: ClassVar[Needs] = ()

    gamma: Annotated[float, SHARE] = 0.7
    """Discount from one turn to the next, in [0, 1]. 0: the first turn alone (`derived`); 1: linear."""

    discount: Annotated[str, OneOf(tuple(DISCOUNTS))] = "derived"
    """derived: phi as Eqs. 14-15 give it. printed: phi as Eq. 16 prints it, without gamma^t."""

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return CreditTraits(discount=self.gamma)

    def __call__(self, group: Sequence[Trajectory], **_: Any) -> list[Tensor]:
        """Return phi(t, T) of every turn, one tensor per trajectory, without unit [turns]."""
        return weigh_group(self, group)

    def weigh(self, position: Tensor, turns: Tensor, confidence: Tensor | None = None) -> Tensor:
        """Return phi(t, T) of every turn, without unit [turns]."""
        return DISCOUNTS[self.discount](position, turns, gamma=self.gamma)
