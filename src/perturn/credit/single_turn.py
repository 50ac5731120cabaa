"""Credits that need no group, since each weight depends on its turn alone: uniform, confidence, discount."""

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
        credit: Credit whose weights depend on the turn alone.
        group: Trajectories.
        reference: log pi_ref of each turn's tokens, in nats `[trajectories][turns]`, each [tokens]; None unless the
            credit needs it.

    Returns:
        Weights, without unit, one tensor per trajectory [turns].

    Raises:
        ValueError: If the credit needs the reference, and `reference` is None or does not have one entry per turn.
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
    """Return the geometric mean of pi_ref over the tokens of each turn, in (0, 1] [turns].

    The sums run in the same order as in `TurnLogprobs`, so both agree to the last bit.
    """
    if not turns:
        return torch.zeros(0)
    counts = torch.tensor([len(turn) for turn in turns])
    turn_index = torch.arange(len(turns)).repeat_interleave(counts)
    tokens = torch.cat(list(turns))
    sums = torch.zeros(len(turns), dtype=tokens.dtype).index_add(0, turn_index, tokens)
    return (sums / counts).exp()


@dataclass(frozen=True)
class Uniform:
    """Weight 1 for every turn, as in a loss on whole episodes.

    Source: none. It is the baseline for comparisons of turn-level credits.
    Differs: nothing.
    """

    needs: ClassVar[Needs] = ()
    traits: ClassVar[CreditTraits] = CreditTraits(weighs_sides=True)

    def __call__(self, group: Sequence[Trajectory], **_: Any) -> list[Tensor]:
        """Return 1 for every turn, one tensor per trajectory, without unit [turns]."""
        return weigh_group(self, group)

    def weigh(self, position: Tensor, turns: Tensor, confidence: Tensor | None = None) -> Tensor:
        """Return 1 for every turn, without unit [turns]."""
        return torch.ones_like(position)


def confidence_weights(confidence: Tensor, *, pivot: float, low: float, high: float) -> Tensor:
    """Return a low weight for each turn that the reference is confident about, and a high weight for other turns.

        omega_i = low  if p_i > pivot else high,   p_i = exp(mean_j log pi_ref(y_ij))

    Source: tlm-DRE ("turn-level multiscale density ratio estimation"), Eqs. 9-10.
    Differs: nothing. The confidence comes from the reference, never from the policy, and carries no gradient.

    Args:
        confidence: p, in (0, 1] [turns].
        pivot: Largest confidence at which a turn still gets the high weight, in [0, 1].
        low: Weight of a confident turn, without unit.
        high: Weight of any other turn, without unit.

    Returns:
        Weights, without unit [turns].
    """
    return torch.full_like(confidence, low).masked_fill(confidence <= pivot, high)


@dataclass(frozen=True)
class Confidence:
    """Low weight for turns that the reference is confident about, high weight for all other turns.

        omega_i = low if p_i > pivot, else high,   p_i = exp((1 / n_i) sum_j log pi_ref(y_ij))

    n_i counts the tokens of turn i. See `confidence_weights`.

    Source: tlm-DRE ("turn-level multiscale density ratio estimation"), Eqs. 9-10.
    Differs: nothing.
    """

    needs: ClassVar[Needs] = ("reference",)
    traits: ClassVar[CreditTraits] = CreditTraits(weighs_sides=True)

    pivot: Annotated[float, SHARE] = 0.9
    """Confidence above which a turn gets the low weight, in [0, 1]."""

    low: Annotated[float, POSITIVE] = 0.2
    """Weight of a turn that the reference is confident about, without unit; > 0."""

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
    """Return the discount of turn t of T as derived from the occupancy measure.

        phi(t, T) = gamma^t (1 - gamma^(T - t)) / (1 - gamma^T)

    Source: DMPO (Shi et al. 2024), Eqs. 14-15 and Corollary 4.0.2.
    Differs: the printed Eq. 16 lacks the factor gamma^t; see printed_discount. Exact limits: gamma = 0 gives 1 for the
    first turn and 0 for the others, gamma = 1 gives (T - t) / T.

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
    Differs: nothing. gamma = 0 gives 1 for every turn, which contradicts Corollary 4.0.2 of the paper. gamma = 1 gives
    the exact limit (T - t) / T.

    Args and Returns: the same as in derived_discount.
    """
    if gamma == 0:
        return torch.ones_like(position)
    if gamma == 1:
        return (turns - position) / turns
    # 1 - gamma^k is computed as -expm1(k log gamma), which stays accurate when gamma is near 1.
    log_gamma = math.log(gamma)
    return torch.expm1((turns - position) * log_gamma) / torch.expm1(turns * log_gamma)


DISCOUNTS: dict[str, Callable[..., Tensor]] = {"derived": derived_discount, "printed": printed_discount}
"""Name of a discount -> function that computes it."""


@dataclass(frozen=True)
@bounded
class Discount:
    """DMPO's weight, which falls from the first turn of an episode to the last.

        phi(t, T) = gamma^t (1 - gamma^(T - t)) / (1 - gamma^T)          derived
        phi(t, T) = (1 - gamma^(T - t)) / (1 - gamma^T)                  printed

    T is the number of turns of the episode. See `derived_discount` and `printed_discount`.

    Source: DMPO (Shi et al. 2024), Eqs. 14-15; as printed, Eq. 16.
    Differs: see `derived_discount`.
    """

    needs: ClassVar[Needs] = ()

    gamma: Annotated[float, SHARE] = 0.7
    """Discount from one turn to the next, in [0, 1]. At 1 the weight falls linearly with t. At 0 `derived` weighs the
    first turn alone."""

    discount: Annotated[str, OneOf(tuple(DISCOUNTS))] = "derived"
    """Formula of phi. derived: from Eqs. 14-15. printed: Eq. 16 as printed, without gamma^t."""

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return CreditTraits(weighs_sides=True, discount=self.gamma)

    def __call__(self, group: Sequence[Trajectory], **_: Any) -> list[Tensor]:
        """Return phi(t, T) of every turn, one tensor per trajectory, without unit [turns]."""
        return weigh_group(self, group)

    def weigh(self, position: Tensor, turns: Tensor, confidence: Tensor | None = None) -> Tensor:
        """Return phi(t, T) of every turn, without unit [turns]."""
        return DISCOUNTS[self.discount](position, turns, gamma=self.gamma)
